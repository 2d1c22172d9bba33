"""Options of a run: ranges, and the schedule."""

import pytest

from flashmap_hf.training.config import TrainConfig, learning_rate_scale


def test_learning_rate_is_a_trapezoid() -> None:
    scales = [learning_rate_scale(p, 0.1, 0.5) for p in (0.0, 0.05, 0.1, 0.4, 0.75, 1.0, 1.2)]
    assert scales == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 2), ("window", 3), ("num_hidden_layers", 1), ("coupling", "independent")]
)
def test_a_run_is_not_resumed_with_another_drafter(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, name: str, value: object
) -> None:
    trainer_for(target, build(target), sequences, tmp_path).save_checkpoint()
    fields = build(target).config.to_dict() | {name: value}
    other = trainer_for(target, FlashMapDrafter(FlashMapConfig.from_dict(fields)), sequences, tmp_path)
    with pytest.raises(ValueError, match=rf"holds a run with {name}=\w+, not {value}"):
        other.load_checkpoint()


@pytest.mark.parametrize("options", [{"runs": 0}, {"run_length": 0}, {"runs": 10_000}])
def test_sizes_that_make_no_batch_are_refused(
    target: LlamaForCausalLM, sequences: list[SequenceFeatures], tmp_path: Path, options: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        trainer_for(target, build(target), sequences, tmp_path, **options).run()


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
