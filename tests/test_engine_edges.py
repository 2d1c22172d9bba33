"""What must hold where the engine meets unusual targets, caches, drafters and interruptions."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from conftest import oracle_for, random_prompt, tiny_drafter, tiny_target
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import flashmap_hf
from flashmap_hf import FlashMapGenerationConfig, candidates
from flashmap_hf.candidates import FlashMapCandidateGenerator
from flashmap_hf.costs import StepCost
from flashmap_hf.generation_config import DraftOptions
from flashmap_hf.modeling_flashmap import FlashMapOutput

DOORS = ("assistant_model", "custom_generate")
MODES: dict[str, dict[str, Any]] = {
    "chain": {"adaptive": False},
    "tree": {"adaptive": False, "tree_size": 10},
    "n-grams": {"adaptive": False, "draft_ngrams": True},
    "adaptive": {"adaptive": True},
}
FREE = StepCost({1: 1.0, 2: 1.001, 3: 1.002, 5: 1.003, 9: 1.004, 17: 1.005}, 0.001)  # everything pays


@pytest.fixture
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flashmap_hf.doors"], "cost_of", lambda *_, **__: FREE)


def generate(target: Any, drafter: Any, door: str, inputs: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    """Through one of the two doors."""
    if door == "assistant_model":
        settings = {name: kwargs.pop(name) for name in ("do_sample", "max_new_tokens", "top_k") if name in kwargs}
        config = FlashMapGenerationConfig(**settings, **options)
        return target.generate(**inputs, generation_config=config, assistant_model=drafter, **kwargs)
    streamer = kwargs.pop("streamer", None)
    return target.generate(
        **inputs, custom_generate=flashmap_hf.decoder(drafter, streamer=streamer, **options), **kwargs
    )


def taught(target: Any, text: torch.Tensor, **overrides: Any) -> Any:
    oracle = oracle_for(target, **{"block_size": 4, "window": 4, **overrides})
    oracle.teach(target, text)
    return oracle


# --- masks and positions


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3"])
@pytest.mark.parametrize("mode", MODES)
def test_a_window_is_kept_whatever_cache_the_user_gives(family: str, mode: str, everything_pays: None) -> None:
    """`DynamicCache()` keeps every key; the target's own mask slides all the same, a tree's mask would not."""
    target = tiny_target(family)
    inputs = random_prompt(12, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20, cache=DynamicCache())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a chain, not a tree
        found = generate(
            target, taught(target, plain), DOORS[0], inputs, MODES[mode], do_sample=False, max_new_tokens=20,
            cache=DynamicCache(),
        )  # fmt: skip
    assert found.tolist() == plain.tolist()


def test_a_batch_of_a_sliding_target_is_refused_whatever_cache_the_user_gives() -> None:
    target = tiny_target("mistral")
    inputs = {name: value.repeat(2, 1) for name, value in random_prompt(12, 64, seed=3).items()}
    with pytest.raises(ValueError, match="A batch of 2 rows cannot be drafted for"):
        generate(
            target, tiny_drafter(target), DOORS[0], inputs, {}, do_sample=False, max_new_tokens=4, cache=DynamicCache()
        )


def test_local_attention_drafts_a_chain() -> None:
    """GPT-Neo masks by the place in the cache, which is not the position in a tree."""
    target = tiny_target(
        "gpt_neo", attention_types=[[["global", "local", "local"], 1]], window_size=8, num_layers=3, num_heads=4
    )
    inputs = random_prompt(12, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    with pytest.warns(UserWarning, match="Drafting a chain, not a tree: GPTNeoForCausalLM has layers of local"):
        found = generate(
            target, taught(target, plain), DOORS[0], inputs, MODES["tree"], do_sample=False, max_new_tokens=24
        )
    assert found.tolist() == plain.tolist()


LONG = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 24}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "llama",
        {"max_position_embeddings": 96, "rope_parameters": {**LONG, "rope_type": "longrope", "factor": 4.0}},
    ),
    "longrope, whose cache is made anew": (
        "phi3",
        {
            "max_position_embeddings": 96, "original_max_position_embeddings": 24, "sliding_window": None,
            "rope_parameters": {**LONG, "rope_type": "longrope"},
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_change_with_the_length_change_where_plain_changes_them(
    rope: str, mode: str, everything_pays: None
) -> None:
    """A drafted token behind the limit would change the frequencies of those before it."""
    family, overrides = ROPES[rope]
    target = tiny_target(family, **overrides)
    inputs = random_prompt(12, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=30)
    oracle = taught(target, plain)
    with pytest.warns(UserWarning, match=r"changes its rotary frequencies behind 24 positions: decoding without"):
        found = generate(target, oracle, DOORS[0], inputs, MODES[mode], do_sample=False, max_new_tokens=30)
    assert found.tolist() == plain.tolist()
    with warnings.catch_warnings(), flashmap_hf.record() as stats:  # before the limit nothing changes
        warnings.simplefilter("error")
        found = generate(target, oracle, DOORS[0], inputs, MODES[mode], do_sample=False, max_new_tokens=12)
    assert found.tolist() == plain[:, :24].tolist()
    assert stats.drafted > 0


def test_frequencies_behind_the_limit_are_drafted_for() -> None:
    family, overrides = ROPES["longrope"]
    target = tiny_target(family, **overrides)
    inputs = random_prompt(30, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    with flashmap_hf.record() as stats:
        found = generate(
            target, taught(target, plain), DOORS[0], inputs, MODES["tree"], do_sample=False, max_new_tokens=12
        )
    assert found.tolist() == plain.tolist()
    assert stats.accepted > 0


@pytest.mark.parametrize("mode", MODES)
def test_no_draft_passes_the_last_position(mode: str, everything_pays: None) -> None:
    """A table of 24 positions; plain decoding ends within it, so must a block."""
    target = tiny_target("gpt2", max_position_embeddings=24)
    inputs = random_prompt(12, 64, seed=3)
    end = int(target.generate(**inputs, do_sample=False, max_new_tokens=11)[0, -1])
    settings = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": end, "pad_token_id": 0}
    plain = target.generate(**inputs, **settings)
    assert plain.shape[1] <= 24
    oracle = taught(target, plain, block_size=6)
    found = generate(target, oracle, DOORS[1], inputs, MODES[mode], **settings)
    assert found.tolist() == plain.tolist()


# --- interruptions, and what users own


class Interrupts(BaseStreamer, StoppingCriteria):
    """A streamer or a criterion that ends the call from inside once it has seen `length` tokens."""

    def __init__(self, length: int):
        self.length, self.tokens = length, list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) >= self.length:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError("the call was interrupted")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = input_ids[0].tolist()
        if len(self.tokens) >= self.length:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", ["streamer", "criterion"])
def test_after_an_interruption_the_users_cache_holds_what_was_committed(
    by: str, mode: str, door: str, everything_pays: None
) -> None:
    """A stop button: what was streamed goes on from the cache, as after plain decoding."""
    target = tiny_target("llama")
    inputs = random_prompt(7, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    for length in (8, 11, 13, 14):
        cache, interrupts = DynamicCache(config=target.config), Interrupts(length)
        own = (
            {"stopping_criteria": StoppingCriteriaList([interrupts])} if by == "criterion" else {"streamer": interrupts}
        )
        with pytest.raises(KeyboardInterrupt):
            generate(
                target, taught(target, plain), door, inputs, MODES[mode], do_sample=False, max_new_tokens=24,
                cache=cache, **own,
            )  # fmt: skip
        assert interrupts.tokens == plain[0, : len(interrupts.tokens)].tolist()
        assert cache.get_seq_length() == len(interrupts.tokens) - 1
        text = torch.tensor([interrupts.tokens])
        rest = target.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_length=plain.shape[1], cache=cache
        )
        assert rest.tolist() == plain.tolist()


def test_an_empty_cache_given_to_a_batch_stays_empty() -> None:
    """Rows that end leave the cache of a batch: what is left would be of no use to the user."""
    target = tiny_target("llama")
    inputs = {name: value.repeat(2, 1) for name, value in random_prompt(7, 64, seed=3).items()}
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    cache = DynamicCache(config=target.config)
    found = generate(
        target, tiny_drafter(target), DOORS[0], inputs, MODES["tree"], do_sample=False, max_new_tokens=8, cache=cache
    )
    assert found.tolist() == plain.tolist()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_offloaded_target_in_every_mode(mode: str, batch: int) -> None:
    """Also where the costs of its forwards are measured first."""
    target, offloaded = tiny_target("llama"), tiny_target("llama")
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    inputs = {name: value.repeat(batch, 1) for name, value in random_prompt(7, 64, seed=3).items()}
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    found = generate(
        offloaded, tiny_drafter(target, block_size=4), DOORS[0], inputs, MODES[mode], do_sample=False, max_new_tokens=8
    )
    assert found.tolist() == plain.tolist()


def test_the_first_call_with_a_seed_gives_what_later_ones_do_in_training_mode() -> None:
    """Costs are measured in the first one, and dropout draws from the global generator."""
    target = tiny_target("llama", attention_dropout=0.5).train()
    drafter = tiny_drafter(target, block_size=4)
    inputs, texts = random_prompt(7, 64, seed=3), []
    for _ in range(2):
        torch.manual_seed(7)
        text = generate(target, drafter, DOORS[0], inputs, MODES["adaptive"], do_sample=True, max_new_tokens=12)
        texts.append((text.tolist(), torch.get_rng_state().tolist()))
    assert texts[0] == texts[1]
    assert target.training


# --- drafters that do not work


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "options", [*MODES.values(), {"adaptive": False, "num_drafts": 3}, {"adaptive": True, "num_drafts": 3}], ids=str
)
def test_a_call_complains_once_about_a_drafter_that_is_not_finite(
    options: dict[str, Any], do_sample: bool, batch: int, everything_pays: None
) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=4)
    drafter.forward = lambda taps, *_, **__: FlashMapOutput(logits=torch.full((len(taps), 4, 64), torch.nan))
    inputs = {name: value.repeat(batch, 1) for name, value in random_prompt(7, 64, seed=3).items()}
    with warnings.catch_warnings(record=True) as caught, flashmap_hf.record() as stats:
        warnings.simplefilter("always")
        generate(
            target, drafter, DOORS[0], inputs, {**options, "verification": "rejection"}, do_sample=do_sample,
            max_new_tokens=12,
        )  # fmt: skip
    assert ["not finite" in str(warning.message) for warning in caught] == [True]
    assert stats.plain_calls == 1
    assert stats.blocks == batch


@pytest.mark.parametrize("options", [{"adaptive": False}, {"tree_size": 8}], ids=["chain", "tree"])
def test_a_transition_that_is_not_finite_is_noticed_before_a_token_is_drawn(options: dict[str, Any]) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=4, transition_rank=4)
    torch.nn.init.constant_(drafter.head.transition.readout.weight, torch.nan)
    settings = {**options, "verification": "rejection"}
    with pytest.warns(UserWarning, match="not finite"), flashmap_hf.record() as stats:
        generate(
            target, drafter, DOORS[0], random_prompt(7, 64, seed=3), settings, do_sample=True, max_new_tokens=12
        )  # fmt: skip
    assert (stats.blocks, stats.plain_calls) == (1, 1)


def test_a_path_that_is_not_finite_ends_drafting_even_if_another_one_is() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=4)
    options = DraftOptions(4, 0.0, "rejection", 1)
    generator = FlashMapCandidateGenerator(drafter, target, target.generation_config, LogitsProcessorList(), options)
    with pytest.warns(UserWarning, match="not finite"):
        assert not generator.finite(torch.tensor([torch.nan]))
    assert generator.finite(torch.tensor([0.0]))
    assert not generator.working


# --- how much is verified


@pytest.mark.parametrize("rule", ["rejection", "shared_noise"])
def test_however_many_drafts_a_step_verifies_at_most_64_nodes(rule: str) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=8, window=4)
    options = {"adaptive": False, "num_drafts": 64, "verification": rule}
    with flashmap_hf.record() as stats:
        generate(
            target, drafter, DOORS[0], random_prompt(7, 64, seed=3), options, do_sample=True, max_new_tokens=12
        )  # fmt: skip
    assert 32 * (stats.target_steps - 4) < stats.nodes <= 64 * (stats.target_steps - 1)


# --- memory


def test_the_prompt_is_tapped_no_further_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    widths: list[int] = []

    def spied(hidden_states: Any, layers: Any) -> torch.Tensor:
        widths.append(hidden_states[layers[-1]].shape[1])
        return torch.cat([hidden_states[i] for i in layers], dim=-1)

    monkeypatch.setattr(candidates, "tap", spied)
    drafter = tiny_drafter(target, block_size=4, window=6)
    generate(
        target, drafter, DOORS[0], random_prompt(100, 64, seed=3), MODES["chain"], do_sample=False, max_new_tokens=8
    )
    assert max(widths) == 6


# --- what a call says of itself


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"assistant_confidence_threshold": 0.3}, "assistant_confidence_threshold ends one path"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor is applied along one path"),
    ],
)
def test_a_tree_that_would_be_a_chain_says_why(settings: dict[str, Any], reason: str) -> None:
    target = tiny_target("llama")
    inputs = random_prompt(7, 64, seed=3)
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False, **settings)
    config = FlashMapGenerationConfig(tree_size=8, max_new_tokens=12, do_sample=False, **settings)
    with pytest.warns(UserWarning, match=f"Drafting a chain, not a tree: {reason}"):
        ours = target.generate(**inputs, generation_config=config, assistant_model=tiny_drafter(target))
    assert torch.equal(ours, plain)


def test_a_plain_call_does_not_count_the_padding_of_its_rows() -> None:
    target = tiny_target("llama")
    inputs = {name: value.repeat(3, 1) for name, value in random_prompt(7, 64, seed=3).items()}
    inputs["input_ids"][1, 3], inputs["input_ids"][2, 3] = 11, 12
    free = target.generate(**inputs, max_new_tokens=12, do_sample=False)[:, 7:].tolist()
    end = free[0][4]
    expected = sum(row.index(end) + 1 if end in row else len(row) for row in free)
    assert expected < 36
    with pytest.warns(UserWarning, match="meta device"), flashmap_hf.record() as stats:
        target.generate(
            **inputs, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0,
            assistant_model=tiny_drafter(target).to("meta"),
        )  # fmt: skip
    assert (stats.plain_calls, stats.committed, stats.target_steps) == (1, expected, expected)
