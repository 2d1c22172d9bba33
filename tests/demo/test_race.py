"""Races of tiny models: texts as in lone calls, a device fairly shared, and threads that end however a race ends."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import oracle_for, random_prompt, tiny_drafter, tiny_target

from flashmap_hf.demo.controls import Controls
from flashmap_hf.demo.race import Race, Turns
from flashmap_hf.runs import run

TOKENS = 40
PROMPT = random_prompt(7, 64, seed=1)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A target and a drafter that knows what follows the prompt; some of each block is spoilt."""
    target = tiny_target("llama")
    drafter = oracle_for(target)
    plain = run(target, PROMPT, Controls("x", max_new_tokens=TOKENS).plain(), 0)
    drafter.teach(target, torch.cat([PROMPT["input_ids"], torch.tensor([plain.tokens])], dim=1))
    return target, drafter


def race(models: tuple[Any, Any], stop=lambda: False, **options: Any) -> Race:
    controls = Controls("x", **({"max_new_tokens": TOKENS} | options))
    return Race(*models, PROMPT, (controls.plain(), controls.drafted()), controls.seed, stop)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmap")] == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [{}, {"tree": True}, {"block_size": 2, "num_steps": 2}, {"adaptive": True}])
def test_each_side_writes_what_it_writes_alone(models, temperature, how):
    """Also when sampling: each side finds its own random numbers, whatever the order of the turns was."""
    controls = Controls("x", max_new_tokens=TOKENS, temperature=temperature, seed=3, **how)
    before = torch.get_rng_state()
    found = race(models, temperature=temperature, seed=3, **how)
    found.run()
    assert torch.equal(torch.get_rng_state(), before)
    target, drafter = models
    assert found.plain.tokens == run(target, PROMPT, controls.plain(), 3).tokens
    assert found.flashmap.tokens == run(target, PROMPT, controls.drafted(), 3, assistant_model=drafter).tokens
    assert found.plain.finished and found.flashmap.finished


def test_a_token_has_its_origin(models):
    found = race(models)
    found.run()
    assert found.plain.tokens == found.flashmap.tokens
    assert {len(commit.tokens) for commit in found.plain.commits} == {1}
    assert {commit.accepted for commit in found.plain.commits} == {0}
    first, *steps = found.flashmap.commits
    assert (len(first.tokens), first.accepted) == (1, 0)  # the prefill
    assert [len(step.tokens) for step in steps[:-1]] == [step.accepted + 1 for step in steps[:-1]]
    assert sum(step.accepted for step in steps) == found.flashmap.stats.accepted > 0
    assert len(found.flashmap.commits) == found.flashmap.stats.target_steps


def test_an_end_inside_a_block_is_a_draft(models):
    """The end token of a text may be an accepted draft: then nothing of that step is the target's own."""
    target, _ = models
    controls = Controls("x", max_new_tokens=TOKENS)
    text = run(target, PROMPT, controls.plain(), 0).tokens
    place = next(i for i in range(8, TOKENS) if text[i] not in text[:i])
    configs = controls.plain(), controls.drafted()
    for config in configs:
        config.eos_token_id = text[place]
    ends = set()
    for start in range(5):  # the oracle spoils other places each time
        models[1].random.manual_seed(start)
        found = Race(*models, PROMPT, configs, 0, lambda: False)
        found.run()
        assert found.flashmap.tokens == found.plain.tokens == text[: place + 1]
        last = found.flashmap.commits[-1]
        ends.add(last.accepted == len(last.tokens))
    assert any(ends)


def test_clocks_count_the_own_turns_only(models):
    start = time.perf_counter()
    found = race(models)
    found.run()
    total = time.perf_counter() - start
    for side in (found.plain, found.flashmap):
        seconds = [commit.seconds for commit in side.commits]
        assert seconds == sorted(seconds)
        assert side.seconds > 0
    assert found.plain.seconds + found.flashmap.seconds < total


def test_the_turn_goes_to_the_side_that_has_used_less(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flashmap_hf.demo.race.time", SimpleNamespace(perf_counter=lambda: now[0]))
    turns = Turns(("plain", "flashmap"), torch.device("cpu"))
    order = []

    def side(name: str, step: float) -> None:
        with turns.share(name):
            for _ in range(4):
                order.append(name)
                now[0] += step  # what a target step takes
                turns.hand_over(name)

    threads = [threading.Thread(target=side, args=args) for args in (("flashmap", 5.0), ("plain", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order == ["plain", "flashmap", "plain", "plain", "flashmap", "plain", "flashmap", "flashmap"]


def test_a_stop_ends_both_sides_at_their_next_step(models):
    stop = threading.Event()
    found = race(models, stop.is_set, max_new_tokens=400)
    thread = threading.Thread(target=found.run)
    thread.start()
    while len(found.plain.commits) < 3 or len(found.flashmap.commits) < 3:
        time.sleep(0.005)
    stop.set()
    seen = len(found.plain.commits), len(found.flashmap.commits)
    thread.join(20)
    assert not thread.is_alive()
    assert len(found.plain.commits) <= seen[0] + 2
    assert len(found.flashmap.commits) <= seen[1] + 2
    shared = min(len(found.plain.tokens), len(found.flashmap.tokens))
    assert found.plain.tokens[:shared] == found.flashmap.tokens[:shared]


@pytest.mark.parametrize("broken", ["target", "drafter"])
def test_an_exception_on_one_side_ends_the_other_and_is_raised(models, broken):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the cable fell out")

    {"target": target, "drafter": drafter}[broken].register_forward_pre_hook(fail)
    found = race((target, drafter), max_new_tokens=400)
    with pytest.raises(RuntimeError, match="the cable fell out"):
        found.run()
    assert len(found.plain.commits) < 400


def test_the_drafter_that_cannot_help_decodes_plainly(models):
    target, _ = models
    drafter = tiny_drafter(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(float("nan"))
    found = race((target, drafter))
    with pytest.warns(UserWarning, match="drafter"):
        found.run()
    assert found.flashmap.tokens == found.plain.tokens
    assert found.flashmap.stats.plain_calls == 1
