"""A kill at any point leaves the last complete state."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from flashmap_hf.training import checkpoint


def test_latest_complete_state_is_read(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {"step": 1})
    checkpoint.save(tmp_path, 2, {"a": torch.zeros(2)}, {"step": 2})
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    # killed after the rename, before the marker: the new file is not the state yet
    (tmp_path / "3-state.safetensors").write_bytes(b"anything")
    (tmp_path / "4-state.safetensors.tmp").write_bytes(b"half")
    found = checkpoint.load(tmp_path)
    assert found is not None
    tensors, marker = found
    assert marker["step"] == 2 and not tensors["a"].any()


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {})
    (tmp_path / "1-state.safetensors").unlink()
    with pytest.raises(OSError, match="1-state"):
        checkpoint.load(tmp_path)


def test_optimiser_state_round_trip() -> None:
    def build() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer: torch.nn.Linear, optimiser: torch.optim.AdamW) -> None:
        layer(torch.ones(1, 3)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    layer, optimiser = build()
    step(layer, optimiser)
    other, restored = build()
    other.load_state_dict(layer.state_dict())
    saved = {name: tensor.clone() for name, tensor in checkpoint.optimiser_tensors("adam", optimiser).items()}
    checkpoint.restore_optimiser("adam", restored, saved)
    step(layer, optimiser)
    step(other, restored)
    assert torch.equal(layer.weight, other.weight) and torch.equal(layer.bias, other.bias)


@pytest.mark.parametrize("marker", ["{", "[]", "{}", None], ids=["cut off", "a list", "no file", "weights"])
def test_damage_is_named(tmp_path: Path, marker: str | None) -> None:
    checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {})
    damaged = tmp_path / ("1-state.safetensors" if marker is None else "state.json")
    damaged.write_text(marker or "no weights")
    with pytest.raises(OSError, match=r"damaged checkpoint.*delete state\.json"):
        checkpoint.load(tmp_path)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0-state.safetensors.tmp").write_bytes(b"of a run that was killed")
    checkpoint.save(tmp_path, 1, {"a": torch.ones(2)}, {"step": 1})

    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"2-state\.safetensors\.tmp could not be written.*No space left"):
        checkpoint.save(tmp_path, 2, {"a": torch.ones(2)}, {"step": 2})
    found = checkpoint.load(tmp_path)
    assert found is not None and found[1]["step"] == 1 and not list(tmp_path.glob("*.tmp"))
