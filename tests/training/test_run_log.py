"""The log survives a kill; trackers are found where they are installed."""

from pathlib import Path

import pytest

from flashmap_hf.training import run_log


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    assert run_log.read_rows(tmp_path) == []
    run_log.write_row(tmp_path, {"step": 1})
    with (tmp_path / run_log.LOG).open("a") as log:
        log.write('{"step": 2, "cro')
    run_log.write_row(tmp_path, {"step": 2})
    assert run_log.read_rows(tmp_path) == [{"step": 1}, {"step": 2}]


def test_history_has_one_row_per_step(tmp_path: Path) -> None:
    for step, score in ((1, 1.1), (2, 1.2), (2, 1.3)):
        run_log.write_row(tmp_path, {"step": step, "held_out_tokens_per_step": score})
        run_log.write_row(tmp_path, {"step": step, "velocity": 1.0})
    assert [row["held_out_tokens_per_step"] for row in run_log.held_out_history(tmp_path)] == [1.1, 1.3]


def test_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, expected in (
        (set(), None),
        ({"tensorboard"}, "tensorboard"),
        ({"tensorboard", "trackio"}, "trackio"),
    ):
        monkeypatch.setattr(
            run_log.importlib.util, "find_spec", lambda name, installed=installed: name if name in installed else None
        )
        assert run_log.tracker("auto") == expected and run_log.tracker("none") is None
    with pytest.raises(ValueError, match="pip install wandb"):
        run_log.tracker("wandb")
