"""`record()`: right counts, nested, one thread at a time, and nothing left behind."""

import threading

import pytest
import torch
from oracle import BLOCK, PLAIN, PROMPT, run, scene, taught, tiny_drafter

import flashmap_hf
from flashmap_hf.statistics import Recorder, Statistics

START = PROMPT.shape[1]


def test_counts_when_everything_is_accepted():
    target, text = scene()
    oracle = taught(target, text)
    _, stats = run(target, oracle, max_new_tokens=1 + 2 * (BLOCK + 1))
    assert (stats.calls, stats.plain_calls) == (1, 0)
    assert (stats.committed, stats.target_steps, stats.blocks) == (11, 3, 2)
    assert (stats.drafted, stats.accepted) == (2 * BLOCK, 2 * BLOCK)
    assert stats.drafted_by_position == stats.accepted_by_position == [2] * BLOCK
    assert stats.acceptance_by_position == [1.0] * BLOCK
    assert stats.tokens_per_step == 11 / 3
    assert oracle.passes == 2


def test_counts_when_drafts_are_refused():
    """New tokens 0 | 1 2 [3 wrong] | 4 5 6 7 8 | ...: the first block keeps two and emits the right third."""
    target, text = scene()
    _, stats = run(target, taught(target, text, [START + 3]), max_new_tokens=9)
    assert (stats.committed, stats.target_steps, stats.blocks) == (9, 3, 2)
    assert (stats.drafted, stats.accepted) == (8, 6)
    assert stats.drafted_by_position == [2, 2, 2, 2]
    assert stats.accepted_by_position == [2, 2, 1, 1]
    assert stats.acceptance_by_position == [1.0, 1.0, 0.5, 0.5]


def test_target_steps_are_target_forwards():
    target, text = scene()
    forwards = []
    oracle = taught(target, text, [START + 4, START + 5, START + 9])
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    try:
        _, stats = run(target, oracle, max_new_tokens=14)
    finally:
        handle.remove()
    assert stats.target_steps == len(forwards)
    assert stats.blocks == oracle.passes


def test_the_last_block_is_as_short_as_the_room():
    target, text = scene()
    _, stats = run(target, taught(target, text), max_new_tokens=4)
    assert stats.drafted_by_position == [1, 1]  # token 0 by the prefill, 1 and 2 drafted, 3 from the target


def test_seconds():
    target, _ = scene()
    _, stats = run(target, tiny_drafter(target), max_new_tokens=6)
    assert stats.seconds_drafter > 0
    assert stats.seconds_target > stats.seconds_prefill > 0


def test_blocks_nest():
    target, text = scene()
    oracle = taught(target, text)
    with flashmap_hf.record() as outer:
        run(target, oracle, max_new_tokens=3)
        with flashmap_hf.record() as inner:
            run(target, oracle, max_new_tokens=6)
        after = inner.committed
        run(target, oracle, max_new_tokens=2)
    assert (outer.calls, outer.committed) == (3, 11)
    assert (inner.calls, inner.committed) == (1, 6)
    assert inner.committed == after


def test_empty_outside_and_without_a_drafter():
    target, text = scene()
    with flashmap_hf.record() as stats:
        pass
    run(target, taught(target, text), max_new_tokens=3)
    assert stats == Statistics()
    assert stats.tokens_per_step == 0.0
    assert stats.acceptance_by_position == []
    with flashmap_hf.record() as stats:
        target.generate(PROMPT, **PLAIN, max_new_tokens=3)
    assert stats == Statistics()


def test_threads_are_apart():
    target, text = scene()
    oracles = [taught(target, text) for _ in range(2)]
    found: dict[int, Statistics] = {}
    barrier = threading.Barrier(2, timeout=60)

    def work(index: int, length: int) -> None:
        with flashmap_hf.record() as stats:
            barrier.wait()
            target.generate(PROMPT, **PLAIN, max_new_tokens=length, assistant_model=oracles[index])
            barrier.wait()
        found[index] = stats

    with flashmap_hf.record() as here:
        workers = [threading.Thread(target=work, args=(i, length)) for i, length in enumerate((3, 8))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert (found[0].calls, found[0].committed) == (1, 3)
    assert (found[1].calls, found[1].committed) == (1, 8)
    assert here == Statistics()


def test_an_exception_leaves_nothing_behind():
    target, text = scene()
    oracle = taught(target, text)

    def broken(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), flashmap_hf.record() as stats:
        run(target, oracle, max_new_tokens=4, stopping_criteria=[broken])
    run(target, oracle, max_new_tokens=4)
    assert (stats.calls, stats.committed) == (1, 0)
    assert Recorder(torch.device("cpu")).statistics == ()


def test_a_generator_left_half_way_does_not_leak():
    """`record` in a generator that is closed early, as a demo's handler is."""

    def handler():
        with flashmap_hf.record() as stats:
            yield stats

    running = handler()
    next(running)
    running.close()
    assert Recorder(torch.device("cpu")).statistics == ()
