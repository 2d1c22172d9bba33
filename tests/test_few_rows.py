"""The product of few rows in its two forms: equal, chosen by measurement, and gone without a trace after a forward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import oracle_for, random_prompt, tiny_drafter, tiny_target
from torch import nn

from flashmap_hf import FlashMapGenerationConfig, decoder, few_rows
from flashmap_hf.few_rows import SIZES, FewRows, faster_counts, linear, transposed_product


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_KNOWN", {})
    for name, value in (("SMALL", 0), ("COLD", 10 * 2**10), ("PIECE", 2**10)):
        monkeypatch.setattr(few_rows, name, value)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transposed form wins every measurement."""
    monkeypatch.setattr(few_rows, "_is_faster", lambda pieces, count: True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (1, 5, 7), (3, 2, 7), (2, 17, 7)])
def test_both_forms_are_the_same_product(shape: tuple[int, ...], bias: bool) -> None:
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)
    b = torch.randn(11, dtype=torch.float64) if bias else None
    product = transposed_product(x, weight, b)
    torch.testing.assert_close(product, nn.functional.linear(x, weight, b), rtol=0, atol=1e-14)
    assert product.is_contiguous()
    strided = transposed_product(x.mT.contiguous().mT if len(shape) > 1 else x, weight, b)
    torch.testing.assert_close(strided, product, rtol=0, atol=1e-14)


def test_gradients_flow_through_it() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(transposed_product, (x, weight))


@pytest.mark.parametrize(
    ("faster", "counts"),
    [
        ({}, set()),
        ({1}, {1}),
        ({2}, set()),
        ({1, 2, 4}, {1, 2, 3, 4}),
        ({2, 4, 16}, {2, 3, 4}),
        ({4, 8, 16}, set()),
        (set(SIZES), set(range(1, 17))),
    ],
)
def test_only_what_was_measured_to_be_faster(
    faster: set[int], counts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "_is_faster", lambda pieces, count: count in faster)
    used: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        used.append(len(x))
        return transposed_product(x, weight, bias)

    monkeypatch.setattr(few_rows, "transposed_product", counted)
    weight = torch.randn(6, 4)
    assert faster_counts(weight) == counts
    for rows in range(1, 20):
        linear(torch.randn(rows, 4), weight)
    assert used == sorted(counts)


def test_a_shape_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(few_rows, "_is_faster", lambda pieces, count: measured.append(count) or True)
    threads = [threading.Thread(target=lambda: faster_counts(torch.ones(6, 4))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(measured) == list(SIZES)
    faster_counts(torch.ones(4, 6))
    assert len(measured) == 2 * len(SIZES)


@pytest.mark.parametrize("shape", [(8, 8), (2**7, 2**5), (1, 2**14), (2**14, 1)])
def test_a_measurement_reads_more_than_a_cache_and_no_copy_of_a_large_weight(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()

    def note(pieces: list[torch.Tensor], count: int) -> bool:
        sizes.add(sum(piece.numel() for piece in pieces))
        return False

    monkeypatch.setattr(few_rows, "_is_faster", note)
    faster_counts(torch.empty(shape))
    assert few_rows.COLD - few_rows.PIECE <= min(sizes) <= max(sizes) <= max(few_rows.COLD, shape[1])


def test_a_real_measurement_ends() -> None:
    assert faster_counts(torch.randn(512, 256)) <= set(range(1, SIZES[-1] + 1))


def test_a_small_weight_is_left_alone(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    monkeypatch.setattr(few_rows, "SMALL", 25)
    assert not faster_counts(torch.ones(6, 4)) and faster_counts(torch.ones(5, 5))


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(6, 4, dtype=torch.bfloat16),
        torch.ones(6, 4, dtype=torch.float64),
        torch.ones(6, 4, device="meta"),
        torch.ones(4, 6).t(),
        torch.ones(6, 4).as_subclass(type("Packed", (torch.Tensor,), {})),
    ],
    ids=["bfloat16", "float64", "meta", "strided", "subclass"],
)
def test_other_weights_stay_as_they_are(weight: torch.Tensor, always: None) -> None:
    assert not faster_counts(weight)


def test_a_layer_is_fast_within_a_forward_only(always: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))
    before = [dict(vars(module)) for module in model.modules()]
    seen: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module))
    x = torch.randn(3, 4)
    expected = model(x)
    products = FewRows(model)
    with products.applied():
        assert "forward" in vars(model[0]) and "forward" in vars(model[2])
        torch.testing.assert_close(model(x), expected)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert seen == [model[0]] * 2
    with pytest.raises(KeyboardInterrupt), products.applied():
        raise KeyboardInterrupt
    assert [dict(vars(module)) for module in model.modules()] == before


def test_two_threads_in_one_model(always: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    first, second = FewRows(model), FewRows(model)
    with first.applied():
        with second.applied():
            pass
        model(torch.ones(2, 4))  # slower, and right
    assert "forward" not in vars(model[0])


def test_a_model_with_forwards_of_its_own_is_left_alone(always: None) -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    assert len(FewRows(model).forwards) == 1
    model[0].forward = lambda x: x  # as accelerate's hooks do
    assert not FewRows(model).forwards
    compiled = nn.Sequential(nn.Linear(4, 6))
    compiled[0].compile(backend="eager")
    assert not FewRows(compiled).forwards


class _Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_linear_of_another_class_is_left_alone(always: None) -> None:
    assert not FewRows(nn.Sequential(_Own(4, 6))).forwards


OPTIONS: list[dict[str, Any]] = [{}, {"tree_size": 6}, {"draft_ngrams": True}, {"adaptive": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "chain"))
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_greedy_output_is_that_of_plain_generate(
    family: str, rows: int, options: dict[str, Any], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    used: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        used.append(x.shape[-2])
        return transposed_product(x, weight, bias)

    monkeypatch.setattr(few_rows, "transposed_product", counted)
    inputs = random_prompt(9, target.config.vocab_size, seed=1)
    inputs = {name: value.repeat(rows, 1) for name, value in inputs.items()}
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert not used
    oracle = oracle_for(target)
    oracle.teach(target, plain[:1])
    for drafter in (tiny_drafter(target), oracle)[: 2 if rows == 1 else 1]:  # an oracle knows one sequence
        ours = target.generate(
            **inputs, max_new_tokens=24, do_sample=False, custom_generate=decoder(drafter, **options)
        )
        assert torch.equal(ours, plain)
    assert used
    used.clear()
    assert torch.equal(target.generate(**inputs, max_new_tokens=24, do_sample=False), plain) and not used


def test_the_products_of_a_call_end_with_it_when_it_raises(always: None) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    inputs = random_prompt(9, target.config.vocab_size, seed=1)

    class Failing:
        calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1
            if self.calls == 4:
                raise OSError("the reader has gone")

        def end(self) -> None: ...

    with pytest.raises(OSError, match="the reader has gone"):
        target.generate(
            **inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter, streamer=Failing(),
            generation_config=FlashMapGenerationConfig(),
        )  # fmt: skip
    assert not any("forward" in vars(module) for model in (target, drafter) for module in model.modules())
