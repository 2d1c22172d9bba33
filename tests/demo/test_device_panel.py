"""What the panel says about the device, and whether two models fit."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_files import write_drafter, write_target

from flashmap_hf import targets
from flashmap_hf.demo import device_panel, memory
from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.shelf import Shelf
from flashmap_hf.modeling_flashmap import FlashMapDrafter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"target": str(write_target(root / "target")), "drafter": str(write_drafter(root / "drafter"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_is_the_size_of_the_models(names, dtype):
    need = memory.estimate(Controls("x", **names), dtype)
    target, _ = targets.load(names["target"], dtype=dtype)
    drafter = FlashMapDrafter.from_pretrained(names["drafter"], dtype=dtype)
    weights = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in (target, drafter)]
    assert need.target == pytest.approx(weights[0], rel=0.01)
    assert need.drafter >= weights[1]
    assert need.total > need.target + need.drafter + need.caches


def test_the_embedded_pair_is_estimated_without_its_weights():
    need = memory.estimate(Controls("x"), torch.float32)
    assert 0.5e9 < need.target < 0.6e9  # 134.5 million parameters


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path):
    machine = SimpleNamespace(available=8_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_bytes(CPU) == 8_000
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 8_000
    (tmp_path / "memory.max").write_text("3000\n")
    assert memory.free_bytes(CPU) == 2_000


def test_the_panel_tells_device_precision_and_fit(names):
    shelf = Shelf(torch.float32, CPU)
    text = device_panel.panel(Controls("x", **names), shelf, asked=False)
    assert "thread(s)" in text and "float32: this CPU has no bfloat16 instructions" in text and ": fits" in text
    assert "fm-bad" not in text
    shelf.get(Controls("x", **names))
    assert "<dd>loaded, " in device_panel.panel(Controls("x", **names), shelf, asked=True)


def test_what_does_not_fit_or_exist_is_marked(names, monkeypatch):
    shelf = Shelf(torch.float32, CPU)
    text = device_panel.panel(Controls("x", target=names["target"], drafter="<b>/nowhere"), shelf, asked=False)
    assert "fm-bad" in text and "<b>" not in text
    monkeypatch.setattr(device_panel, "free_bytes", lambda _: 10)
    assert "does not fit" in device_panel.panel(Controls("x", **names), shelf, asked=False)


def test_an_embedded_target_that_was_not_fetched_is_not_fetched_for_the_estimate(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMAP_HOME", str(tmp_path))
    monkeypatch.setattr(targets, "fetch_gguf", lambda *_: pytest.fail("fetched"))
    text = device_panel.panel(Controls("x"), Shelf(torch.float32, CPU), asked=False)
    assert "estimated once the first run has fetched" in text


@pytest.mark.parametrize(
    ("dtype", "device", "asked", "words"),
    [
        (torch.bfloat16, "cpu", False, "this CPU multiplies it natively"),
        (torch.bfloat16, "cuda", False, "native on this GPU"),
        (torch.float16, "cuda", False, "this GPU has no native bfloat16"),
        (torch.float32, "cuda", True, "as asked for"),
    ],
)
def test_why_this_precision(dtype, device, asked, words):
    assert device_panel.why(dtype, torch.device(device), asked) == words
