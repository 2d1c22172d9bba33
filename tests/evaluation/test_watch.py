"""What is seen of a call from outside is what happened inside."""

import pytest
import torch
from conftest import oracle_for, random_prompt, tiny_target

from flashmap_hf import FlashMapGenerationConfig, Statistics, record
from flashmap_hf.evaluation.acceptance import BlockCounter
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.methods import early_exit, flashmap, plain, prompt_lookup
from flashmap_hf.evaluation.paired import measure
from flashmap_hf.evaluation.watch import watched
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.runs import Settings

ITEM = Item(0, PromptRow("p", "x"), 0)


def scene(seed: int = 1, length: int = 60):
    target, inputs = tiny_target("llama"), random_prompt(6, 64, seed=seed)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=length)
    drafter = oracle_for(target)
    drafter.teach(target, text)
    return target, inputs, drafter, text


@pytest.mark.parametrize("stop", [False, True], ids=["length", "end token"])
def test_a_drafters_counts_are_those_of_record(stop):
    """The drafter's own loop counts from inside, the watch from outside: position by position the same."""
    target, inputs, drafter, text = scene()
    new = text[0, 6:].tolist()
    end = next(i for i in range(25, 60) if new[i] not in new[:i]) if stop else 59
    (method,) = (m for m in flashmap(drafter, target, "", False) if m.name == "flashmap")
    config = FlashMapGenerationConfig(
        do_sample=False, max_new_tokens=60, eos_token_id=new[end] if stop else None, **method.options
    )

    class Both(BlockCounter):
        def put(self, value):
            super().put(value)
            watch.put(value)

    with record() as stats, watched(target, 6) as watch:
        counter = Both(stats)
        method.generate(inputs, config, counter)
    steps = watch.steps
    assert sum(steps.committed) == stats.committed == end + 1
    assert sum(steps.forwards) == stats.target_steps == len(steps.committed)
    assert sum(steps.drafted_tokens) == stats.drafted and sum(steps.kept) == stats.accepted
    by_position = [sum(count > k for count in steps.kept) for k in range(5)]
    assert by_position == stats.accepted_by_position and by_position[2] > 0


def test_trees_are_counted_by_the_statistics():
    target, inputs, drafter, _ = scene()
    (method,) = (m for m in flashmap(drafter, target, "", False) if m.name == "flashmap")
    config = FlashMapGenerationConfig(do_sample=False, max_new_tokens=30, **method.options)
    drafter.random.manual_seed(0)
    with watched(target, 6) as seen:
        method.generate(inputs, config, seen)
    drafter.random.manual_seed(0)
    with record() as stats, watched(target, 6, stats) as told:
        method.generate(inputs, config, told)
    for name in ("drafted_tokens", "kept", "committed", "forwards"):
        assert getattr(seen.steps, name) == getattr(told.steps, name)


def test_prompt_lookup_is_replayed():
    """By hand: the drafts are the tokens behind the last match, the kept ones those that plain decoding has."""
    target = tiny_target("llama")
    inputs = {name: torch.cat([t, t], dim=1) for name, t in random_prompt(9, 64, seed=3).items()}
    new = target.generate(**inputs, do_sample=False, max_new_tokens=30)[0, 18:].tolist()
    result = measure(target, prompt_lookup(target, 4), ITEM, inputs, Settings(30), 0, 1)
    assert result.tokens == new and sum(result.committed) == 30
    assert sum(result.drafted_tokens) > 0
    for kept, committed in zip(result.kept, result.committed, strict=True):
        assert committed - 1 <= kept <= committed
    assert result.drafted_tokens[0] == 4  # the prompt repeats itself: the prefill already holds a draft


def test_layers_that_draft_are_no_target_steps():
    target, inputs, _, text = scene()
    forwards = []
    handle = target.register_forward_pre_hook(lambda module, args: forwards.append(target.config.num_hidden_layers))
    result = measure(target, early_exit(target, 1), ITEM, inputs, Settings(40), 0, 1)
    handle.remove()
    assert result.tokens == text[0, 6:46].tolist()
    assert sum(result.forwards) == forwards.count(3) < len(forwards)
    assert target.config.num_hidden_layers == 3


def test_the_parts_of_a_step_are_its_time_and_hooks_are_taken_off():
    target, inputs, *_ = scene()
    result = measure(target, plain(target), ITEM, inputs, Settings(20), 0, 1)
    assert result.committed == [1] * 20 and result.drafted == result.judged == result.accepted == []
    assert all(ms > 0 for ms in result.verify_ms) and min(result.draft_ms + result.commit_ms) >= 0
    assert 0.9 * result.seconds < sum(result.step_ms) / 1e3 <= result.seconds
    assert not target._forward_pre_hooks and not target._forward_hooks


def test_a_call_that_fails_leaves_no_hook():
    target = tiny_target("llama")
    with pytest.raises(ZeroDivisionError), watched(target, 6, Statistics()):
        raise ZeroDivisionError
    assert not target._forward_pre_hooks and not target._forward_hooks
