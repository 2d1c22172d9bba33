"""Options of a run: ranges, budget, record, and the schedule."""

from pathlib import Path
from typing import Any

import pytest

from flashmap_hf.options import parse
from flashmap_hf.training.config import TrainConfig, learning_rate_scale

OUT = Path("run")


def config(**overrides: Any) -> TrainConfig:
    return TrainConfig(**{"out": OUT, "features": [Path("features")], **overrides})


def test_learning_rate_is_a_trapezoid() -> None:
    scales = [learning_rate_scale(p, 0.1, 0.5) for p in (0.0, 0.05, 0.1, 0.4, 0.75, 1.0, 1.2)]
    assert scales == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_minutes", 0.0),
        ("max_minutes", float("nan")),
        ("max_steps", 0),
        ("runs", 0),
        ("ema", 2.0),
        ("start_share", -0.1),
        ("clip", -1.0),
        ("velocity", float("inf")),
        ("held_out", -1),
        ("draft_vocab", -5),
        ("seed", 10**17),
        ("run_length", 10**9),
        ("block_size", 10**7),
        ("adam_lr", 1e38),
        ("max_minutes", float("inf")),
        ("clip", float("nan")),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        config(**{name: value})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"features": []}, "--features FOLDER, or on --answers FILE with --online"),
        ({"answers": Path("a")}, "with --online"),
        ({"answers": Path("a"), "online": True}, "--features FOLDER, or"),
        ({"lora": 8}, "--drafter"),
        ({"merge": True}, "--lora"),
        ({"cross_entropy": 0.0, "velocity": 0.0}, "no loss"),
        ({"out": Path()}, "--out FOLDER: name the folder of the run"),
        ({"gpu": "L4"}, "--gpu, --gpu-tflops and --gpu-gib go with --dry-run"),
        ({"config": Path("c"), "window": 4}, "--config describes the drafter: leave out --window"),
        ({"config": Path("c"), "drafter": "x/y"}, "--config describes the drafter: leave out --drafter"),
    ],
)
def test_options_that_exclude_each_other(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**overrides)


def test_the_budget_is_minutes_or_steps_or_both() -> None:
    assert config().progress(1800.0, 10**9) == 0.5  # an hour, without --max-steps
    assert config(max_steps=10).progress(1e9, 5) == 0.5
    assert config(max_steps=10, max_minutes=1.0).progress(45.0, 5) == 0.75


def test_the_record_has_no_path_of_the_machine(tmp_path: Path) -> None:
    record = TrainConfig(
        tmp_path / "run", features=[tmp_path / "f"], drafter=str(tmp_path), target="org/model"
    ).record()
    assert record["out"] == "run" and record["features"] == ["f"] and record["target"] == "org/model"
    assert str(tmp_path) not in str(record) and record["drafter"] == tmp_path.name


def test_the_config_is_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--out", "run", "--features", "a", "b", "--max-minutes", "3", "--optimiser", "adamw", "--kl", "0.5"]
    parsed = parse(TrainConfig, args, "flashmap train")
    assert parsed == TrainConfig(OUT, features=[Path("a"), Path("b")], max_minutes=3.0, optimiser="adamw", kl=0.5)
    with pytest.raises(ValueError, match="unknown arguments: --no-such; see flashmap train --help"):
        parse(TrainConfig, [*args, "--no-such"], "flashmap train")
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--help"], "flashmap train")
    shown = " ".join(capsys.readouterr().out.split())
    assert "K, tokens drafted in one pass" in shown and "gradient norm of what AdamW moves" in shown
