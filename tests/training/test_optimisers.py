"""What is moved by what; and that our Muon is torch's, in float32."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flashmap_hf.training import optimisers
from flashmap_hf.training.config import TrainConfig
from flashmap_hf.training.muon import Muon
from flashmap_hf.training.optimisers import build_optimisers


def config(**overrides: object) -> TrainConfig:
    fields = {"features": [Path("f")], "optimiser": "muon"} | overrides
    return TrainConfig(Path("run"), **fields)  # type: ignore[arg-type]


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(*shape)) for shape in ((32, 24), (32, 4), (32,), (24, 32))]


def moved(optimiser: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for group in optimiser.param_groups for p in group["params"]]


def test_muon_has_the_wide_matrices_and_adam_the_rest(parameters: list[nn.Parameter]) -> None:
    both = build_optimisers(parameters, config(), torch.device("cpu"))
    assert moved(both["muon"]) == [(32, 24), (24, 32)] and moved(both["adam"]) == [(32, 4), (32,)]
    assert [group["weight_decay"] for group in both["adam"].param_groups] == [0.01, 0.0]
    for other in (config(optimiser="adamw"), config(lora=4, drafter="d")):
        alone = build_optimisers(parameters, other, torch.device("cpu"))
        assert set(alone) == {"adam"} and len(moved(alone["adam"])) == 4


def test_a_drafter_without_wide_matrices_has_adam_alone() -> None:
    narrow = [nn.Parameter(torch.randn(8, 40)), nn.Parameter(torch.randn(8))]
    assert set(build_optimisers(narrow, config(), torch.device("cpu"))) == {"adam"}


def test_torch_muon_where_bfloat16_is_native(parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, torch.optim.Muon), (False, Muon)):
        monkeypatch.setattr(optimisers, "cpu_multiplies_bfloat16", lambda native=native: native)
        assert type(build_optimisers(parameters, config(), torch.device("cpu"))["muon"]) is expected


def test_ours_and_torchs_take_the_same_steps() -> None:
    """The same update but for the bfloat16 in which torch orthogonalises: relative to the step, its rounding."""
    torch.manual_seed(0)
    start, gradients = torch.randn(48, 32), torch.randn(3, 48, 32)
    ends = []
    for cls in (Muon, torch.optim.Muon):
        weight = nn.Parameter(start.clone())
        optimiser = cls([weight], lr=0.02, weight_decay=0.01, momentum=0.95, ns_steps=3)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimiser.step()
        ends.append(weight.detach() - start)
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) < 2 * 2**-8 * 3
