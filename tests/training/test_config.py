"""Options of a run: ranges, and the schedule."""

import pytest

from flashmap_hf.training.config import TrainConfig, learning_rate_scale


def test_learning_rate_is_a_trapezoid() -> None:
    scales = [learning_rate_scale(p, 0.1, 0.5) for p in (0.0, 0.05, 0.1, 0.4, 0.75, 1.0, 1.2)]
    assert scales == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_minutes", 0.0),
        ("max_minutes", float("nan")),
        ("runs", 0),
        ("ema", 2.0),
        ("start_share", -0.1),
        ("clip", -1.0),
    ],
)
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TrainConfig(**{name: value})  # type: ignore[arg-type]
