"""A drafter's pass, eager and compiled: what the record says, on a tiny pair."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_target
from tiny_files import write_drafter, write_target

import flashmap_hf
from flashmap_hf import FlashMapDrafter
from flashmap_hf.evaluation import compile_cost


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    pair = ["--target", str(write_target(tmp_path / "target")), "--drafter", str(write_drafter(tmp_path / "drafter"))]
    compile_cost.main([*pair, "--rounds", "4", "--out", str(tmp_path / "compile.json"), *options])
    found: dict[str, Any] = json.loads((tmp_path / "compile.json").read_text(encoding="utf-8"))
    return found


def check(record: dict[str, Any], printed: str) -> None:
    assert (record["rounds"], record["dtype"], record["drafter"]) == (4, "float32", "drafter")
    for clock in ("wall_ms", "cpu_ms"):
        for side in ("eager", "compiled"):
            taken = record[clock][side]
            assert 0 < taken["lowest"] <= taken["median"] <= taken["upper_quartile"]
            assert f"{taken['median']:.2f}" in printed
    assert record["largest_difference"] < 1e-5 * max(1.0, record["largest_logit"])
    assert record["seconds_compile"] > 0
    assert f"{record['speedup']['median']:.2f}x" in printed
    assert {"commit", "command", "machine", "versions", "time"} <= record["provenance"].keys()


def test_both_passes_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Traced by torch, without making code, which takes minutes on a busy machine."""
    monkeypatch.setattr(flashmap_hf, "compile", functools.partial(flashmap_hf.compile, backend="eager"))
    check(measured(tmp_path), capsys.readouterr().out)


@pytest.mark.slow
def test_both_passes_are_timed_through_inductor(tmp_path: Path, capsys: Any) -> None:
    check(measured(tmp_path), capsys.readouterr().out)


def test_bad_options_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        compile_cost.main(["--rounds", "1", "--out", str(tmp_path / "out.json")])
    assert "--rounds must be at least 2" in capsys.readouterr().err
    other = FlashMapDrafter.from_target(tiny_target(hidden_size=16))
    other.save_pretrained(tmp_path / "other")
    target = str(write_target(tmp_path / "target"))
    with pytest.raises(ValueError, match="hidden size"):
        compile_cost.main(
            ["--target", target, "--drafter", str(tmp_path / "other"), "--out", str(tmp_path / "out.json")]
        )
