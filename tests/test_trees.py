"""Token trees through the real `generate`: greedy equals plain, the law is the target's, the cache stays clean.

The table target reads its last two tokens from the cache through the mask that it is given, so a refused branch that
stays in the cache, or a node that sees another branch, changes what it says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FAMILIES, oracle_for, random_prompt, tiny_drafter, tiny_target
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from table_model import RIGHT, WRONG, K, check_law, long_run, table_pair
from transformers import StoppingCriteria, StoppingCriteriaList

import flashmap_hf
from flashmap_hf import FlashMapGenerationConfig, sampled_tree
from flashmap_hf.tree import TokenTree

FULL = [name for name in FAMILIES if name in ("llama", "qwen3", "phi", "gpt2", "mixtral", "qwen3_moe")]
TREES = {
    "lattice of 2 per draft": {"num_drafts": 2},
    "lattice of 12": {"tree_size": 12},
    "with n-grams": {"tree_size": 12, "draft_ngrams": True},
}


def config(**options: Any) -> FlashMapGenerationConfig:
    return FlashMapGenerationConfig(**{"do_sample": False, "max_new_tokens": 20, "adaptive": False} | options)


def spread(oracle: Any) -> Any:
    """Its second choice is often the right one: every tree has branches, and they are taken."""
    forward = oracle.forward

    def flatter(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        noise = torch.randn(output.logits.shape, generator=oracle.random)
        output.logits = output.logits * 0.15 + noise
        return output

    oracle.forward = flatter
    return oracle


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", FULL)
def test_greedy_output_is_that_of_plain_generate(family: str, padding: int, attention: str) -> None:
    target = tiny_target(family, attn_implementation=attention)
    inputs = random_prompt(7, 64, seed=3, padding=padding)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    branches = 0
    for options in TREES.values():
        oracle = spread(oracle_for(target, block_size=4, window=4))
        oracle.teach(target, plain, padding)
        with flashmap_hf.record() as stats:
            found = target.generate(**inputs, generation_config=config(**options), assistant_model=oracle)
        assert found.tolist() == plain.tolist()
        branches += stats.nodes > stats.drafted and stats.accepted > 0
    assert branches == len(TREES)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_target_with_a_sliding_window_drafts_a_chain_and_says_so(family: str) -> None:
    target = tiny_target(family)
    inputs = random_prompt(7, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    oracle = oracle_for(target, block_size=4, window=4)
    oracle.teach(target, plain)
    with pytest.warns(UserWarning, match="Drafting a chain, not a tree: the cache of"):
        found = target.generate(**inputs, generation_config=config(tree_size=8), assistant_model=oracle)
    assert found.tolist() == plain.tolist()


def test_everything_that_generate_returns() -> None:
    target = tiny_target("llama", attn_implementation="eager")
    inputs = random_prompt(7, 64, seed=3)
    flags = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    options = {"return_dict_in_generate": True} | dict.fromkeys(flags, True)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20, **options)
    oracle = spread(oracle_for(target, block_size=4, window=4))
    oracle.teach(target, plain.sequences)
    ours = target.generate(**inputs, generation_config=config(tree_size=10, **options), assistant_model=oracle)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.cache.get_seq_length() == ours.sequences.shape[1] - 1
    for name in ("scores", "logits", "hidden_states", "attentions"):
        pairs = zip(getattr(ours, name), getattr(plain, name), strict=True)
        for mine, theirs in pairs:
            mine, theirs = ((x,) if isinstance(x, torch.Tensor) else x for x in (mine, theirs))
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_cache_holds_the_accepted_path_alone() -> None:
    """Key by key what a forward over the committed text makes."""
    target = tiny_target("llama")
    inputs = random_prompt(6, 64, seed=2)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    oracle = spread(oracle_for(target, block_size=4, window=4))
    oracle.teach(target, plain)
    options = config(tree_size=12, return_dict_in_generate=True)
    result = target.generate(**inputs, generation_config=options, assistant_model=oracle)
    with torch.no_grad():
        whole = target(result.sequences[:, :-1]).cache
    for mine, theirs in zip(result.cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-5)


class StopAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


@budget(max_examples=40)
@given(
    size=st.integers(1, 20), slots=st.integers(1, 6), stop=st.integers(1, 24), drafts=st.integers(1, 3),
    seed=st.integers(0, 20), ngrams=st.booleans(),
)  # fmt: skip
def test_any_tree_any_block_any_stop(size: int, slots: int, stop: int, drafts: int, seed: int, ngrams: bool) -> None:
    target = PROPERTY_TARGET
    inputs = random_prompt(5, 64, seed=seed)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    oracle = spread(oracle_for(target, block_size=slots, window=3))
    oracle.teach(target, plain)
    criterion = StopAt(5 + stop)
    options = config(tree_size=size, num_drafts=drafts, max_new_tokens=24, draft_ngrams=ngrams)
    found = target.generate(
        **inputs, generation_config=options, assistant_model=oracle, stopping_criteria=StoppingCriteriaList([criterion])
    )
    assert found.tolist() == plain[:, : 5 + stop].tolist()
    assert criterion.seen == list(range(6, 6 + stop))  # every prefix once, in order, and none behind the end


PROPERTY_TARGET = tiny_target("llama")


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[7]]}]
)
def test_processors_run_on_each_nodes_own_prefix(settings: dict[str, Any]) -> None:
    target = tiny_target("llama")
    inputs = random_prompt(7, 64, seed=3)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20, **settings)
    oracle = spread(oracle_for(target, block_size=4, window=4))
    oracle.teach(target, plain)
    options = config(tree_size=12, draft_ngrams=True, **settings)
    assert target.generate(**inputs, generation_config=options, assistant_model=oracle).tolist() == plain.tolist()


@pytest.mark.parametrize("rule", ["shared_noise", "one_hot", "rejection"])
@pytest.mark.parametrize(
    "options", [{"num_drafts": 2}, {"num_drafts": 4}, {"num_drafts": 2, "draft_ngrams": True}], ids=str
)
def test_law(rule: str, options: dict[str, Any]) -> None:
    p, stats = long_run(*table_pair(), seed=21, tokens=2400, rule=rule, top_k=0, **options)
    assert stats.nodes > stats.drafted, "no tree had a second branch"
    check_law(p, stats)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["shared_noise", "one_hot", "rejection"])
@pytest.mark.parametrize("drafts", [2, 4])
@pytest.mark.parametrize("filters", [{"top_k": 0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}], ids=str)
def test_law_with_many_samples(rule: str, drafts: int, filters: dict[str, Any]) -> None:
    check_law(*long_run(*table_pair(), seed=22, tokens=12000, rule=rule, num_drafts=drafts, **filters))


@pytest.mark.parametrize("options", [{"num_drafts": 2}, {"draft_ngrams": True}], ids=str)
def test_law_with_a_transition(options: dict[str, Any]) -> None:
    check_law(*long_run(*table_pair(transition_rank=4), seed=23, tokens=2400, rule="rejection", top_k=0, **options))


@pytest.mark.parametrize(
    "options", [{"tree_size": 5}, {"tree_size": 12}, {"temperature": 0.8, "top_k": 3, "tree_size": 6},
                {"tree_size": 8, "draft_temperature": 0.6}], ids=str
)  # fmt: skip
@pytest.mark.parametrize("coupling", ["quantile", "independent"])
def test_law_of_sampled_trees(coupling: str, options: dict[str, Any]) -> None:
    pair = table_pair(transition_rank=4, coupling=coupling)
    p, stats = long_run(*pair, seed=25, tokens=2400, rule="rejection", **({"top_k": 0} | options))
    assert stats.nodes > stats.drafted, "no tree had a second branch"
    check_law(p, stats)


def test_a_branch_offered_with_another_law_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness can fail: a likeliest token that is said to be drawn is accepted too often."""
    drawn = sampled_tree._drawn

    def likeliest(*args: Any) -> Any:
        return [(node, int(law.argmax()), law) for node, _, law in drawn(*args)]

    monkeypatch.setattr(sampled_tree, "_drawn", likeliest)
    p, _ = long_run(*table_pair(), seed=24, tokens=6000, rule="rejection", num_drafts=2, top_k=0)
    assert p < WRONG < RIGHT, p


def test_a_masks_row_shows_a_node_its_ancestors() -> None:
    tree = TokenTree([5, 6, 7], [-1, 0, -1], [0.5, 0.4, 0.3])
    assert tree.mask().int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert K >= 2


@pytest.mark.parametrize(
    "option", [{"tree_size": 0}, {"tree_size": 65}, {"num_drafts": 0}, {"seed": -1}, {"adaptive": 3},
               {"draft_temperature": 0}, {"draft_temperature": float("nan")}, {"draft_temperature": True}], ids=str
)  # fmt: skip
def test_what_is_out_of_range_is_named(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        FlashMapGenerationConfig(**option)


def test_an_untrained_drafters_trees_change_nothing() -> None:
    target = tiny_target("llama")
    inputs = random_prompt(7, 64, seed=5)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    for extra in ({}, {"transition_rank": 4}, {"coupling": "independent"}, {"draft_vocab_size": 30}):
        drafter = tiny_drafter(target, block_size=4, window=4, **extra)
        found = target.generate(**inputs, generation_config=config(tree_size=12), assistant_model=drafter)
        assert found.tolist() == plain.tolist()
