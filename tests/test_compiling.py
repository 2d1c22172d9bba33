"""A compiled drafter says what the eager one says, in shapes that never change, and leaves the eager one alone.

Quick tests let torch trace and guard (backend "eager") without making code; the slow ones go through inductor.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from conftest import random_prompt, tiny_drafter, tiny_target
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter

import flashmap_hf
from flashmap_hf import FlashMapDrafter, compiling, drafters, targets
from flashmap_hf.compiling import StaticForward, as_drafter, before_readout
from flashmap_hf.doors import Decoder

# float32: the padded pass and the exact one add the same terms in another order; inductor fuses them in a third.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
HEADS: dict[str, dict[str, Any]] = {
    "shared": {},
    "draft vocabulary": {"draft_vocab_size": 40},
    "low rank": {"head": "low_rank", "head_rank": 8},
    "transition": {"transition_rank": 4},
    "independent": {"coupling": "independent"},
    "midpoint": {"num_steps": 2},
}


def block_inputs(drafter: Any, batch: int, window: int, hidden: bool = False, seed: int = 0) -> dict[str, Any]:
    """What `generate` gives to a drafter for a target of width 32."""
    config, generator = drafter.config, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    u = torch.rand(batch, config.block_size, generator=generator)
    return {
        "taps": normal(batch, window, len(config.tap_layers) * 32),
        "anchor_embeds": normal(batch, 32),
        "rows": None if drafter.head.low_rank else normal(drafter.head.size, 32),
        "u": None if hidden else u,
        "noise": normal(batch, config.block_size, 32) if config.coupling == "independent" else None,
    }


def check_equal(eager: Any, compiled: Any, **inputs: Any) -> None:
    with torch.no_grad():
        expected, found = eager(**inputs), compiled(**inputs)
    assert found.logits.shape == expected.logits.shape
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(found.z_1, expected.z_1, **CLOSE)


@pytest.fixture
def drafter(tiny_llama: Any) -> FlashMapDrafter:
    return tiny_drafter(tiny_llama)


# --- the same numbers, however few shapes ---------------------------------------------------------------------------


def unpadded(drafter: Any) -> StaticForward:
    """Static shapes around the eager forward: the padding alone."""
    return StaticForward(drafter, before_readout(drafter))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("batch", "window"), [(1, 1), (1, 16), (3, 5), (4, 16)])
def test_padding_changes_nothing(tiny_llama: Any, kind: str, batch: int, window: int) -> None:
    drafter = tiny_drafter(tiny_llama, **HEADS[kind])
    for hidden in (False, True):
        check_equal(drafter, unpadded(drafter), **block_inputs(drafter, batch, window, hidden))


def test_rows_that_have_seen_less_keep_their_mask(drafter: FlashMapDrafter) -> None:
    inputs = block_inputs(drafter, 3, 6)
    mask = torch.arange(6) >= torch.tensor([[0], [4], [2]])
    check_equal(drafter, unpadded(drafter), **inputs, mask=mask)
    alone = {name: value[1:2, -2:] if name == "taps" else value[1:2] for name, value in inputs.items() if name in
             ("taps", "anchor_embeds", "u")}  # fmt: skip
    with torch.no_grad():
        expected, found = drafter(**alone, rows=inputs["rows"]), unpadded(drafter)(**inputs, mask=mask)
    torch.testing.assert_close(found.logits[1:2], expected.logits, **CLOSE)


def test_only_powers_of_two_and_one_window_are_compiled(drafter: FlashMapDrafter) -> None:
    counter = CompileCounter()
    compiled = flashmap_hf.compile(drafter, batch_size=3, backend=counter)
    assert counter.frame_count == 3  # 1, 2 and 4 rows
    for batch in (1, 2, 3, 4):
        for window in (1, 7, 16):
            for hidden in (False, True):
                check_equal(drafter, compiled, **block_inputs(drafter, batch, window, hidden, seed=window))
    assert counter.frame_count == 3
    check_equal(drafter, compiled, **block_inputs(drafter, 5, 9))
    assert counter.frame_count == 4  # 8 rows: when they come


@pytest.mark.slow
def test_drafters_do_not_share_torchs_limit_of_variants(tiny_llama: Any) -> None:
    counter = CompileCounter()
    for seed in range(10):
        flashmap_hf.compile(tiny_drafter(tiny_llama, seed), backend=counter)
    assert counter.frame_count == 10


# --- through generate -----------------------------------------------------------------------------------------------


def both_ways(target: Any, eager: Any, compiled: Any, **call: Any) -> None:
    """The same tokens and the same drafts, accepted or not, at every step."""
    found = []
    for drafter in (eager, compiled):
        torch.manual_seed(5)
        with flashmap_hf.record() as stats:
            tokens = target.generate(assistant_model=drafter, **call)
        assert stats.plain_calls == 0
        found.append((tokens.tolist(), stats.blocks, stats.nodes, stats.accepted_by_position))
    assert found[0] == found[1]


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "tree": {"tree_size": 6},
    "shared noise": {"do_sample": True},
    "rejection": {"do_sample": True, "verification": "rejection"},
}


@pytest.fixture(scope="module")
def traced(tiny_llama: Any) -> tuple[FlashMapDrafter, FlashMapDrafter]:
    drafter = tiny_drafter(tiny_llama)
    return drafter, flashmap_hf.compile(drafter, batch_size=4, backend="eager")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_generate_says_the_same(tiny_llama: Any, traced: Any, mode: str, rows: int) -> None:
    prompts = [random_prompt(4 + i, 64, i, padding=rows - 1 - i) for i in range(rows)]
    inputs = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
    config = flashmap_hf.FlashMapGenerationConfig(**{**GREEDY, **MODES[mode]})
    both_ways(tiny_llama, *traced, **inputs, generation_config=config)
    if mode in ("greedy", "tree"):
        plain = tiny_llama.generate(**inputs, **GREEDY)
        assert tiny_llama.generate(**inputs, generation_config=config, assistant_model=traced[1]).equal(plain)


def test_decoder_takes_it(tiny_llama: Any, traced: Any) -> None:
    prompt = random_prompt(6, 64, 1)
    plain = tiny_llama.generate(**prompt, **GREEDY)
    for options in ({}, {"tree_size": 5}, {"adaptive": True}):
        loop = flashmap_hf.decoder(traced[1], **options)
        assert tiny_llama.generate(**prompt, **GREEDY, custom_generate=loop).equal(plain)


@pytest.mark.parametrize("wrapped", [False, True], ids=["drafter", "peft"])
def test_what_torch_compile_made_is_a_drafter(tiny_llama: Any, wrapped: bool) -> None:
    eager: Any = tiny_drafter(tiny_llama)
    if wrapped:
        eager = get_peft_model(eager, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    counter = CompileCounter()
    optimised: Any = torch.compile(eager, backend=counter)
    prompt = random_prompt(3, 64, 2)
    both_ways(tiny_llama, eager, optimised, **prompt, **GREEDY)
    assert counter.frame_count == 1  # the user's own backend, for one shape
    loop = flashmap_hf.decoder(optimised)
    assert isinstance(loop, Decoder)
    assert loop.drafter is as_drafter(optimised)
    assert tiny_llama.generate(**prompt, **GREEDY, custom_generate=loop).equal(tiny_llama.generate(**prompt, **GREEDY))
    assert counter.frame_count == 1
    assert "forward" not in vars(as_drafter(eager))


def test_another_compiled_model_is_no_drafter(tiny_llama: Any) -> None:
    small = tiny_target(seed=1)
    assert as_drafter(torch.compile(small)) is None
    plain = tiny_llama.generate(**random_prompt(5, 64, 0), **GREEDY)
    found = tiny_llama.generate(**random_prompt(5, 64, 0), **GREEDY, assistant_model=small)
    assert found.equal(plain)


def test_what_torch_compile_made_is_freed_with_its_owner(tiny_llama: Any) -> None:
    optimised = torch.compile(tiny_drafter(tiny_llama), backend="eager")
    assert as_drafter(optimised) is as_drafter(optimised)
    before = len(compiling._OPTIMIZED)
    del optimised
    assert len(compiling._OPTIMIZED) == before - 1


def test_a_drafter_compiled_in_place_works_as_it_is_and_as_a_copy(tiny_llama: Any) -> None:
    drafter, reference = tiny_drafter(tiny_llama), tiny_drafter(tiny_llama)
    drafter.compile(backend="eager")  # of nn.Module
    both_ways(tiny_llama, reference, drafter, **random_prompt(5, 64, 3), **GREEDY)
    counter = CompileCounter()
    compiled = flashmap_hf.compile(drafter, backend=counter)
    check_equal(reference, compiled, **block_inputs(reference, 1, 4))
    assert counter.frame_count == 1


# --- the user's object ----------------------------------------------------------------------------------------------


def test_the_drafter_stays_as_it_is(tiny_llama: Any, tmp_path: Any) -> None:
    drafter = tiny_drafter(tiny_llama)
    before, state = dict(vars(drafter)), copy.deepcopy(drafter.state_dict())
    torch.manual_seed(3)
    compiled = flashmap_hf.compile(drafter, backend="eager")
    assert torch.rand(1).equal(torch.rand(1, generator=torch.Generator().manual_seed(3)))
    assert isinstance(compiled, FlashMapDrafter)
    assert compiled is not drafter
    assert vars(drafter) == before
    assert all(value.equal(state[name]) for name, value in drafter.state_dict().items())
    assert all(a is b for a, b in zip(compiled.parameters(), drafter.parameters(), strict=True))
    compiled.save_pretrained(tmp_path)  # it saves like any drafter
    loaded = FlashMapDrafter.from_pretrained(tmp_path)
    assert all(value.equal(state[name]) for name, value in loaded.state_dict().items())
    with torch.no_grad():  # the weights are shared, so a change reaches the compiled forward
        drafter.norm.weight.mul_(2)
    check_equal(drafter, compiled, **block_inputs(drafter, 1, 16))


def test_a_copy_of_a_compiled_drafter_is_refused(traced: Any) -> None:
    with pytest.raises(TypeError, match="copy the drafter that it was made of"):
        copy.deepcopy(traced[1])


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be a positive integer"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"mode": "fast"}, "mode='fast': choose one of default, reduce-overhead"),
        ({"mode": "reduce-overhead"}, "records CUDA graphs, and the drafter is on cpu"),
    ],
)
def test_bad_options_are_refused(drafter: FlashMapDrafter, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flashmap_hf.compile(drafter, **options)


def test_what_cannot_be_compiled_is_refused(tiny_llama: Any, traced: Any) -> None:
    with pytest.raises(ValueError, match="needs a FlashMapDrafter, got LlamaForCausalLM"):
        flashmap_hf.compile(tiny_llama)
    with pytest.raises(ValueError, match="compiled already"):
        flashmap_hf.compile(traced[1])
    with pytest.raises(ValueError, match="meta device"):
        flashmap_hf.compile(tiny_drafter(tiny_llama).to("meta"))


def test_a_failure_is_one_sentence(drafter: FlashMapDrafter) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("No Fortran here.\nA long story.")

    with pytest.raises(OSError, match="cannot be compiled here") as caught:
        flashmap_hf.compile(drafter, backend=broken)
    assert "(No Fortran here.): install what is missing" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_no_compiler_is_one_sentence(drafter: FlashMapDrafter) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}),
        pytest.raises(OSError, match="cannot be compiled here") as caught,
    ):
        flashmap_hf.compile(drafter)
    assert "No working C++ compiler" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_graphs_of_another_thread_are_left_alone(drafter: FlashMapDrafter) -> None:
    """Torch's CUDA graphs fail in a thread that did not record them; here any other thread stands for it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the graph was replayed")

    forward, inputs = StaticForward(drafter, run, threading.get_ident() + 1), block_inputs(drafter, 1, 5)
    with pytest.warns(UserWarning, match="belong to the thread that compiled it"):
        check_equal(drafter, forward, **inputs)


# --- through inductor -----------------------------------------------------------------------------------------------


def test_inductor_says_the_same(drafter: FlashMapDrafter) -> None:
    compiled = flashmap_hf.compile(drafter)
    for window in (2, 16):
        check_equal(drafter, compiled, **block_inputs(drafter, 1, window))
    check_equal(drafter, compiled, **block_inputs(drafter, 1, 16, hidden=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_inductor_says_the_same_for_every_head(tiny_llama: Any, kind: str) -> None:
    drafter = tiny_drafter(tiny_llama, **HEADS[kind])
    compiled = flashmap_hf.compile(drafter, batch_size=2)
    for batch, window in ((1, 3), (2, 16)):
        check_equal(drafter, compiled, **block_inputs(drafter, batch, window))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_real_drafter_says_the_same(dtype: torch.dtype) -> None:
    """bfloat16: rounding may change a draft, and with it the steps; the text stays the target's."""
    target, tokenizer = targets.load("smollm2-135m-instruct", dtype=torch.float32)
    drafter = FlashMapDrafter.from_pretrained(drafters.default_drafter("smollm2-135m-instruct"), dtype=dtype)
    compiled = flashmap_hf.compile(drafter, batch_size=2)
    tokenizer.padding_side = "left"
    inputs = tokenizer(["Hi!", "List three uses of copper, please:"], return_tensors="pt", padding=True)
    one = {name: value[1:] for name, value in inputs.items()}
    for call in (one, inputs):
        for options in ({}, {"num_assistant_tokens": 4}, {"tree_size": 8}):
            config = flashmap_hf.FlashMapGenerationConfig(do_sample=False, max_new_tokens=16, **options)
            if dtype is torch.float32 and options:  # without, each goes by its own measured cost: other steps
                both_ways(target, drafter, compiled, **call, generation_config=config)
            found = target.generate(**call, generation_config=config, assistant_model=compiled)
            assert found.equal(target.generate(**call, do_sample=False, max_new_tokens=16))
