"""The config: defaults that follow the target, one clear sentence for a value out of range, exact round trip."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from flashmap_hf import FlashMapConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("window", 0),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 2),
        ("head_dim", 7),
        ("tap_layers", [3, 2]),
        ("tap_layers", [31]),
        ("tap_layers", []),
        ("head_rank", 8),
        ("draft_vocab_size", 60000),
        ("transition_rank", 0),
        ("transition_rank", -4),
        ("coupling", "other"),
        ("num_steps", 3),
        ("head", "medusa"),
    ],
)
def test_bad_values_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        FlashMapConfig(**{field: value})  # type: ignore[arg-type]


def test_low_rank_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="head_rank"):
        FlashMapConfig(head="low_rank")


def test_round_trip(tmp_path: Path) -> None:
    config = FlashMapConfig(
        target_name="org/model", tap_layers=[3, 30], window=4, block_size=7, coupling="independent", num_steps=2,
        head="low_rank", head_rank=16, draft_vocab_size=100, transition_rank=8, tokenizer_size=49000,
        tokenizer_hash="abc",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, FlashMapConfig) and loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert loaded.num_proposable == 49000


def test_a_file_from_before_the_transition_loads(tmp_path: Path) -> None:
    FlashMapConfig().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["transition_rank"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert AutoConfig.from_pretrained(tmp_path).transition_rank is None
