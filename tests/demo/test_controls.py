"""What a visitor may choose, and what it becomes."""

import pytest

from flashmap_hf import drafters, targets
from flashmap_hf.demo.controls import TREE_SIZE, Controls


def test_empty_names_are_the_embedded_pair():
    controls = Controls("Hi", target=" ", drafter="")
    assert controls.target_name == targets.SMOLLM2.name
    assert controls.drafter_name == str(drafters.default_drafter(targets.SMOLLM2.name))
    assert Controls("Hi", target=" a/b ", drafter=" c/d ").target_name == "a/b"


def test_a_target_without_a_known_drafter_asks_for_one():
    with pytest.raises(ValueError, match="no drafter is known for 'a/b': name one under Drafter"):
        _ = Controls("Hi", target="a/b").drafter_name


def test_the_two_sides_differ_in_drafting_only():
    controls = Controls("Hi", block_size=3, num_steps=2, temperature=0.7, verification="rejection", max_new_tokens=9)
    plain, drafted = controls.plain(), controls.drafted()
    assert (drafted.num_assistant_tokens, drafted.num_steps, drafted.verification) == (3, 2, "rejection")
    assert plain.num_steps is None
    for name in ("max_new_tokens", "do_sample", "temperature"):
        assert getattr(plain, name) == getattr(drafted, name)


def test_greedy_decoding_needs_no_rule():
    assert Controls("Hi", temperature=0.0, verification="one_hot").drafted().verification == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"block_size": 0}, "K must be at least 1, not 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"max_new_tokens": 5000}, "max tokens must be at most 1024, not 5000"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_steps": 3}, "num_steps=3"),
        ({"verification": "guess", "temperature": 1.0}, "verification='guess'"),
    ],
)
def test_values_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Controls(**({"prompt": "Hi"} | options))


def test_a_tree_a_chain_or_what_each_step_chooses():
    chain, tree, adaptive = (
        Controls("Hi", block_size=3, **options).drafted()
        for options in ({}, {"tree": True}, {"adaptive": True, "tree": True})
    )
    assert [config.tree_size for config in (chain, tree, adaptive)] == [None, TREE_SIZE, None]
    assert [config.num_assistant_tokens for config in (chain, tree, adaptive)] == [3, 3, None]
    assert [config.adaptive for config in (chain, tree, adaptive)] == [False, False, True]
