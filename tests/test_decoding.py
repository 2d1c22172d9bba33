"""The loop's state and results: caches, second turns, what `return_dict_in_generate` returns, seeds, the stock loop."""

import copy
from typing import Any

import pytest
import torch
from conftest import difference, lengths_accepted, oracle_for, random_prompt, tiny_drafter, tiny_target
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import flashmap_hf
from flashmap_hf import FlashMapGenerationConfig

NEW_TOKENS = 20


def plain_and_ours(target: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> tuple[Any, Any, Any]:
    """Greedy results of both sides under the same arguments, and the statistics; blocks are accepted and refused."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | kwargs
    plain = target.generate(**inputs, **options)
    oracle = oracle_for(target, block_size=4, window=4)
    oracle.teach(target, plain if isinstance(plain, torch.Tensor) else plain.sequences)
    with flashmap_hf.record() as stats:
        ours = target.generate(**inputs, **options, assistant_model=oracle)
    assert stats.accepted > 0 and lengths_accepted(stats)[0] > 0
    return plain, ours, stats


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_everything_that_generate_returns(family: str) -> None:
    target = tiny_target(family, attn_implementation="eager")
    flags = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    plain, ours, _ = plain_and_ours(
        target, random_prompt(7, 64, seed=3), return_dict_in_generate=True, **dict.fromkeys(flags, True)
    )
    assert type(ours) is type(plain)
    assert ours.sequences.tolist() == plain.sequences.tolist(), difference(target, plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == len(getattr(plain, name)) == NEW_TOKENS
        for mine, theirs in zip(getattr(ours, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for name in ("hidden_states", "attentions"):
        assert len(getattr(ours, name)) == len(getattr(plain, name)) == NEW_TOKENS
        for step, (mine, theirs) in enumerate(zip(getattr(ours, name), getattr(plain, name), strict=True)):
            assert len(mine) == len(theirs)
            for one, other in zip(mine, theirs, strict=True):
                if name == "attentions" and one.shape != other.shape:
                    # past a sliding window a block sees it at its own width: the keys in the window are the same
                    assert family != "llama", step
                    width = min(one.shape[-1], other.shape[-1])
                    one, other = one[..., -width:], other[..., -width:]
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_without_a_dictionary_flags_are_ignored_as_in_plain() -> None:
    target = tiny_target()
    plain, ours, _ = plain_and_ours(target, random_prompt(5, 64, seed=1), output_scores=True)
    assert isinstance(ours, torch.Tensor) and ours.tolist() == plain.tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 5, NEW_TOKENS])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_the_cache_holds_all_but_the_newest_token(family: str, new_tokens: int) -> None:
    target = tiny_target(family)
    inputs = random_prompt(6, 64, seed=2)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    oracle = oracle_for(target, block_size=4, window=4)
    oracle.teach(target, plain)
    result = target.generate(
        **inputs, do_sample=False, max_new_tokens=new_tokens, assistant_model=oracle, return_dict_in_generate=True
    )
    assert result.cache.get_seq_length() == result.sequences.shape[1] - 1 == 6 + new_tokens - 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_second_turn_on_the_users_cache(family: str) -> None:
    target = tiny_target(family)
    inputs = random_prompt(6, 64, seed=4)

    def two_turns(assistant: bool) -> torch.Tensor:
        cache = DynamicCache(config=target.config)
        ids = inputs["input_ids"]
        for turn in range(2):
            reference = target.generate(ids, do_sample=False, max_new_tokens=11)
            extra: dict[str, Any] = {}
            if assistant:
                extra["assistant_model"] = oracle_for(target, block_size=4, window=4)
                extra["assistant_model"].teach(target, reference)
            ids = target.generate(ids, do_sample=False, max_new_tokens=11, cache=cache, **extra)
            assert cache.get_seq_length() == ids.shape[1] - 1
            if turn == 0:
                ids = torch.cat([ids, torch.tensor([[9, 17, 23]])], dim=1)
        return ids

    assert two_turns(True).tolist() == two_turns(False).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_second_turn_of_a_padded_prompt_with_only_the_new_ids(family: str) -> None:
    """The mask covers both turns and is longer than the ids: its zeros must stay at the first turn's padding."""
    target, padding = tiny_target(family), 3
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    first = random_prompt(6, 64, seed=4, padding=padding)

    def reply(assistant: bool) -> list[int]:
        cache = DynamicCache(config=target.config)
        text = target.generate(**first, **options)
        extra: dict[str, Any] = {}
        if assistant:
            extra["assistant_model"] = oracle_for(target, block_size=4, window=4)
            extra["assistant_model"].teach(target, text, padding)
        target.generate(**first, **options, cache=cache, **extra)
        # nothing is left that would keep the next prefill from dropping what a sliding window drops
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        whole = torch.cat([text, torch.tensor([[9, 17, 23]])], dim=1)
        mask = torch.ones_like(whole)
        mask[:, :padding] = 0
        if assistant:
            reference = target.generate(whole, attention_mask=mask, **options)
            extra["assistant_model"].teach(target, reference, padding)
        new = whole[:, cache.get_seq_length() :]
        with flashmap_hf.record() as stats:
            found = target.generate(new, attention_mask=mask, **options, cache=cache, **extra)
        assert (stats.accepted > 0) == assistant
        return found[0, new.shape[1] :].tolist()

    assert reply(True) == reply(False)


@pytest.mark.parametrize("asked", [[0], [1, 3], [-1], 2])
def test_chosen_hidden_states(asked: Any) -> None:
    """transformers takes indices of layers, too; the drafter's own taps are not given away with them."""
    target = tiny_target()
    plain, ours, _ = plain_and_ours(
        target, random_prompt(6, 64, seed=9), return_dict_in_generate=True, output_hidden_states=asked
    )
    for mine, theirs in zip(ours.hidden_states, plain.hidden_states, strict=True):
        assert [h is None for h in mine] == [h is None for h in theirs]
        for one, other in zip(mine, theirs, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_drafter_sees_the_last_committed_positions(
    family: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps of the W positions before the anchor, newest last, and the anchor's embedding: as in training."""
    target, window, prompt = tiny_target(family), 4, random_prompt(3, 64, seed=1, padding=padding)
    plain = target.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
    oracle = oracle_for(target, block_size=4, window=window, tap_layers=[1, 3])
    oracle.teach(target, plain, padding)
    text = plain[:, padding:]
    states = target(text, output_hidden_states=True).hidden_states
    taps = torch.cat([states[1], states[3]], dim=-1)
    embeddings = target.get_input_embeddings()(text[0])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = oracle.forward
    monkeypatch.setattr(oracle, "forward", lambda taps, anchor, **kw: seen.append((taps, anchor)) or forward(taps))
    with flashmap_hf.record() as stats:
        target.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=oracle)
    assert len(seen) == stats.blocks and stats.accepted > 0
    places = []
    for given, anchor in seen:
        distances = (taps[0] - given[0, -1]).abs().amax(-1)
        place = int(distances.argmin()) + 1  # of the anchor
        torch.testing.assert_close(given[0], taps[0, max(place - window, 0) : place], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(anchor[0], embeddings[place])
        places.append(place)
    assert places == sorted(set(places)) and places[0] == 3


def test_a_static_cache_that_never_fills_its_sliding_window() -> None:
    target = tiny_target("mistral", sliding_window=64)
    plain, ours, _ = plain_and_ours(target, random_prompt(6, 64, seed=5), cache_implementation="static")
    assert ours.tolist() == plain.tolist()


CANNOT_ROLL_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "quantised": ("llama", {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
    "static, past its sliding window": ("mistral", {"cache_implementation": "static"}),
}


@pytest.mark.parametrize("case", CANNOT_ROLL_BACK)
def test_a_cache_that_cannot_be_rolled_back_is_refused_before_any_work(case: str) -> None:
    family, options = CANNOT_ROLL_BACK[case]
    target = tiny_target(family)
    forwards: list[int] = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    drafter = tiny_drafter(target, block_size=4)
    inputs = random_prompt(6, 64, seed=5)
    with pytest.raises(ValueError, match=r"cannot be rolled back .* cache_implementation='dynamic'"):
        target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=drafter, **options)
    assert not forwards


def test_a_static_cache() -> None:
    target = tiny_target()
    plain, ours, _ = plain_and_ours(target, random_prompt(6, 64, seed=5), cache_implementation="static")
    assert ours.tolist() == plain.tolist()


def test_chunked_prefill() -> None:
    target = tiny_target()
    plain, ours, _ = plain_and_ours(target, random_prompt(23, 64, seed=6), prefill_chunk_size=5)
    assert ours.tolist() == plain.tolist()


def test_a_prompt_of_2000_tokens() -> None:
    target = tiny_target(max_position_embeddings=4096)
    plain, ours, _ = plain_and_ours(target, random_prompt(2000, 64, seed=7))
    assert ours.tolist() == plain.tolist(), difference(target, plain, ours)


@pytest.mark.parametrize("rule", ["shared_noise", "rejection", "one_hot"])
def test_a_seed_repeats_its_output(rule: Any) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=4, window=4)
    config = FlashMapGenerationConfig(verification=rule, do_sample=True, max_new_tokens=NEW_TOKENS, top_k=0)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(
            target.generate(**random_prompt(5, 64, seed=0), generation_config=config, assistant_model=drafter)
        )
    assert outputs[0].tolist() == outputs[1].tolist() != outputs[2].tolist()


@pytest.mark.parametrize("coupling", ["quantile", "independent"])
def test_greedy_calls_leave_the_global_generator_alone(coupling: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=4, window=4, coupling=coupling)
    state = torch.get_rng_state()
    first = target.generate(**random_prompt(5, 64, seed=0), do_sample=False, max_new_tokens=9, assistant_model=drafter)
    assert torch.equal(torch.get_rng_state(), state)
    again = target.generate(**random_prompt(5, 64, seed=0), do_sample=False, max_new_tokens=9, assistant_model=drafter)
    assert first.tolist() == again.tolist()


def test_nothing_of_the_users_is_changed() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=4, window=4)
    config = FlashMapGenerationConfig(verification="rejection", do_sample=True, temperature=0.8, max_new_tokens=9)
    inputs = random_prompt(5, 64, seed=0)
    kept = copy.deepcopy((target.generation_config, drafter.generation_config, config, inputs))
    weights = {n: t.clone() for m in (target, drafter) for n, t in m.state_dict().items()}
    attributes = set(vars(target)), set(vars(drafter))
    for _ in range(2):
        target.generate(**inputs, generation_config=config, assistant_model=drafter)
    now = (target.generation_config, drafter.generation_config, config, inputs)
    assert [c.to_dict() for c in now[:3]] == [c.to_dict() for c in kept[:3]]
    assert all(torch.equal(kept[3][n], t) for n, t in inputs.items())
    assert all(torch.equal(weights[n], t) for m in (target, drafter) for n, t in m.state_dict().items())
    # transformers itself marks a model whose hidden states were asked for
    assert set(vars(target)) - attributes[0] <= {"_output_capturing_hooks_installed"}
    assert set(vars(drafter)) == attributes[1]


def test_the_stock_loop_with_our_candidates() -> None:
    target = tiny_target()
    inputs = random_prompt(6, 64, seed=8)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    oracle = oracle_for(target, block_size=4, window=4)
    oracle.teach(target, plain)
    ours = GenerationMixin._assisted_decoding
    stock: Any = ours.__wrapped__  # type: ignore[attr-defined]
    mixin: Any = GenerationMixin
    mixin._assisted_decoding = stock
    try:
        found = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=oracle)
    finally:
        mixin._assisted_decoding = ours
    assert found.tolist() == plain.tolist()
