"""Where features come from: files and online agree, what is held out is stable, memory is bounded."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from flashmap_hf.training import sources
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.features import make_features
from flashmap_hf.training.shards import SequenceFeatures
from flashmap_hf.training.sources import (
    LoadedFeatures,
    OnlineFeatures,
    Part,
    draft_vocabulary,
    split,
    stored_features,
)

TAPS = [2, 4]


def test_stored_and_online_features_are_the_same(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    make_features(target, answers[:5], tmp_path / "a", TAPS, context=8)
    make_features(target, answers[5:], tmp_path / "b", TAPS, context=4)
    stored = stored_features([tmp_path / "a", tmp_path / "b"], target.config.name_or_path, 32)
    assert stored.context == 4 and stored.tap_layers == TAPS and len(stored) == 8
    online = OnlineFeatures(target, answers, TAPS, 8, 2048)
    for i in range(5):
        for name in ("taps", "tokens", "argmax", "f_left", "f_right"):
            assert torch.equal(getattr(stored[i], name), getattr(online[i], name)), name
        assert stored.first_and_length(i) == online.first_and_length(i)
        assert list(stored.response(i)) == list(online.response(i)) == answers[i].response_ids
        assert stored.sampled(i) == online.sampled(i) == (answers[i].temperature > 0)


def test_online_features_are_computed_once_and_dropped_again(
    target: LlamaForCausalLM, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = sources.compute

    def compute(model: object, answer: Answer, *rest: object) -> object:
        calls.append(answer.id)
        return original(model, answer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "compute", compute)
    online = OnlineFeatures(target, answers, TAPS, 8, 2048)
    online.group = 2
    probed = [f"a{i}" for i in range(8)]  # to see whose answers they are
    assert calls == probed and online[7] is online[7]
    online.held.clear()
    calls.clear()
    for i in range(6):
        assert online[i] is not None
    assert len(online.held) == 4 and calls == probed[:6]


def answers_of(tokens: Iterable[int]) -> LoadedFeatures:
    """Answers of two tokens, told apart by the first; the odd ones are sampled."""

    def one(token: int) -> SequenceFeatures:
        ids, left = torch.tensor([1, token, 7]), torch.zeros(2)
        return SequenceFeatures(torch.zeros(3, 1), ids, ids[1:], left, left + token % 2, 1)

    return LoadedFeatures([one(token) for token in tokens], [1], 8)


def held(source: LoadedFeatures, wanted: int) -> set[int]:
    training, held_out = split(source, wanted)
    assert sorted([*training.indices, *held_out.indices]) == list(range(len(source)))
    return {int(held_out.response(i)[0]) for i in range(len(held_out))}


def test_what_is_held_out_depends_on_the_answers_and_not_on_their_order() -> None:
    found = held(answers_of(range(10, 90)), 6)
    assert found == held(answers_of(reversed(range(10, 90))), 6)
    assert sum(token % 2 == 0 for token in found) == 6 and sum(token % 2 for token in found) == 3
    assert min(found) < 40 and max(found) > 60  # all over the source


def test_no_answer_that_was_trained_on_is_held_out_when_others_come() -> None:
    some, others = range(10, 90), range(100, 300)
    together = held(answers_of([*others, *some]), 6)
    assert together & set(some) <= held(answers_of(some), 6) and together & set(others) <= held(answers_of(others), 6)
    assert len(together) == 9


def test_copies_of_a_held_out_answer_go_with_it() -> None:
    once = held(answers_of(range(10, 50)), 4)
    assert held(answers_of([*range(10, 50), *range(10, 50)]), 4) == once
    assert len(split(answers_of([*range(10, 50), *range(10, 50)]), 4)[1]) == 12


def test_of_few_answers_at_most_a_quarter_is_held_out() -> None:
    assert len(held(answers_of(range(10, 26)), 1000)) == 4  # two of the greedy ones, and of the sampled ones
    assert not held(answers_of(range(10, 26)), 0)


def test_a_part_speaks_of_its_own_answers(target: LlamaForCausalLM, answers: list[Answer]) -> None:
    part = Part(OnlineFeatures(target, answers, TAPS, 8, 2048), [3, 6])
    assert len(part) == 2 and part.group == 2
    assert list(part.response(1)) == answers[6].response_ids
    assert (part.sampled(0), part.sampled(1)) == (True, False)
    assert part[0].tokens[-1] == answers[3].response_ids[-1]


def test_draft_vocabulary_is_the_most_frequent_and_the_end(target: LlamaForCausalLM) -> None:
    source = OnlineFeatures(target, [Answer("a", 1.0, [9, 9], [5, 5, 5, 7, 3])], TAPS, 8, 2048)
    assert draft_vocabulary(source, 3, [30], 40).tolist() == [5, 7, 30]
    assert draft_vocabulary(source, 6, [30], 40).tolist() == [0, 1, 3, 5, 7, 30]
    # ids that the tokenizer lacks are never proposed, though the target may have said them
    assert draft_vocabulary(source, 3, [30], 7).tolist() == [0, 3, 5]


def test_online_answers_of_another_target_are_refused(target: LlamaForCausalLM, answers: list[Answer]) -> None:
    foreign = [Answer(a.id, 0.0, a.prompt_ids, [(t + 7) % 40 for t in a.response_ids]) for a in answers]
    with pytest.raises(ValueError, match="another model's answers"):
        OnlineFeatures(target, foreign, TAPS, 8, 2048)
