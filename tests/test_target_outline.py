"""A target without its weights: the real one's modules, and names that lead nowhere."""

from pathlib import Path

import pytest
from tiny_files import write_target

from flashmap_hf import FlashMapDrafter, target_outline, targets


def test_the_outline_has_the_modules_and_no_memory(tmp_path: Path) -> None:
    write_target(tmp_path)
    target = target_outline.outline(tmp_path)
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}
    assert target.config.name_or_path == str(tmp_path) and not target.training
    tokenizer = target_outline.tokenizer(tmp_path)
    assert FlashMapDrafter.from_target(target, tokenizer).config.tokenizer_size == len(tokenizer)


def test_an_embedded_target_goes_by_its_name_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = targets.SMOLLM2.name
    assert target_outline.hub_id(name) == targets.SMOLLM2.hub_id
    assert target_outline.hub_id("org/model") == "org/model" and target_outline.hub_id(tmp_path) is None
    monkeypatch.setenv("FLASHMAP_HOME", str(tmp_path))
    assert target_outline.source(name) == targets.SMOLLM2.hub_id
    (folder := tmp_path / "targets" / name).mkdir(parents=True)
    monkeypatch.setattr(targets, "is_complete", lambda path, target: path == folder)
    assert target_outline.source(name) == str(folder)


@pytest.mark.parametrize("name", ["/no/such/folder", "not a name", "org/never-heard-of"])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(
        OSError, match=r"the configuration of target .* cannot be read .*: pass an embedded name"
    ) as caught:
        target_outline.outline(name)
    said = str(caught.value)
    assert repr(name) in said and "cannot be read (" in said and "): pass an embedded name" in said and "\n" not in said
    with pytest.raises(OSError, match="the tokenizer of target"):
        target_outline.tokenizer(name)


def test_a_model_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="is no causal language model") as caught:
        target_outline.outline(tmp_path)
    assert len(str(caught.value)) < 600
