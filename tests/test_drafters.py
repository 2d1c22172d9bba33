"""Which drafter goes with a target, and what is said where there is none."""

import pytest
import torch
from tiny_files import write_drafter, write_target

from flashmap_hf import FlashMapDrafter, drafters
from flashmap_hf.targets import available

CPU = torch.device("cpu")


@pytest.fixture
def cards(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "CARDS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", available())
def test_every_embedded_target_has_a_drafter(cards, target):
    folder = cards / drafters.DEFAULTS[target]
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ValueError, match=rf"the drafter {folder.name} for {target} is not in .*: .*--drafter"):
            drafters.default_drafter(target)
        (folder / name).touch()
    assert drafters.default_drafter(target) == folder


def test_cards_lie_beside_the_package():
    assert drafters.CARDS.name == "hub_cards"
    assert (drafters.CARDS.parent / "pyproject.toml").is_file()


@pytest.mark.parametrize("target", ["nope", "owner/name", "."])
def test_other_targets_have_none(target):
    with pytest.raises(ValueError, match=r"no drafter is known for target '.*' \(but for smollm2-135m-instruct\)"):
        drafters.default_drafter(target)


def test_a_drafter_loads_in_the_type_that_is_asked_for(tmp_path):
    drafter = drafters.load(write_drafter(tmp_path), dtype=torch.bfloat16, device=CPU)
    assert type(drafter) is FlashMapDrafter
    assert drafter.dtype is torch.bfloat16
    assert not drafter.training


def test_another_model_is_refused_before_its_weights_are_read(tmp_path):
    (write_target(tmp_path) / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(OSError, match="a model of type 'llama', not a FlashMap drafter"):
        drafters.check(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        drafters.check(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"no config\.json"):
        drafters.check(tmp_path)
