"""Generation stops exactly where plain decoding stops, wherever in a block that is.

The oracle's blocks are accepted whole: the first new token comes from the prefill, the next K + 1 from the first block,
and so on. So event places 0 .. 2K + 2 fall on every offset of a block, its bonus token included.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import (
    BLOCK,
    PROMPT,
    VOCABULARY,
    complaints,
    continuation,
    run,
    scene,
    taught,
    tiny_drafter,
    tiny_tokenizer,
)
from oracle import PLAIN as GREEDY
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria, stopping_criteria

PLACES = range(2 * BLOCK + 3)
START = PROMPT.shape[1]


def compare(make_kwargs: Callable[[], dict[str, Any]], wrong: tuple[int, ...] = (), length: int = 12) -> Any:
    """Plain decoding and the oracle, with fresh arguments each: same text; returns its new tokens."""
    target, text = scene()
    plain = target.generate(PROMPT, **(GREEDY | {"max_new_tokens": length} | make_kwargs()))
    for drafter in (taught(target, text, [START + i for i in wrong]), tiny_drafter(target)):
        found, stats = run(target, drafter, **({"max_new_tokens": length} | make_kwargs()))
        assert found.tolist() == plain.tolist()
        assert stats.committed == plain.shape[1] - START
        assert stats.accepted <= stats.drafted
        assert sum(stats.accepted_by_position) == stats.accepted
        assert stats.target_steps <= stats.committed
    return plain[0, START:].tolist()


# --- end of sequence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_eos_at_every_offset(place):
    new = compare(lambda: {"eos_token_id": continuation()[place]})
    assert new == continuation()[: place + 1]


@pytest.mark.parametrize(
    "as_given",
    [
        lambda eos, other: [other, eos],
        lambda eos, other: torch.tensor(eos),
        lambda eos, other: torch.tensor([other, eos]),
        lambda eos, other: None,
    ],
    ids=["list", "scalar tensor", "tensor", "none"],
)
@pytest.mark.parametrize("place", [0, 3, BLOCK, BLOCK + 1])
def test_eos_in_every_form(as_given, place):
    other = next(i for i in range(len(VOCABULARY)) if i not in continuation())
    eos = as_given(continuation()[place], other)
    new = compare(lambda: {"eos_token_id": eos})
    assert new == continuation()[: 12 if eos is None else place + 1]


def test_eos_from_a_generation_config():
    config = GenerationConfig(eos_token_id=[continuation()[7]], pad_token_id=0, max_new_tokens=12, do_sample=False)
    before = config.to_dict()
    target, text = scene()
    found = target.generate(PROMPT, generation_config=config, assistant_model=taught(target, text))
    assert found[0, START:].tolist() == continuation()[:8]
    assert config.to_dict() == before


def test_two_ends_the_earlier_wins():
    first, second = continuation()[3], continuation()[6]
    assert compare(lambda: {"eos_token_id": [second, first]}) == continuation()[:4]


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 2 * BLOCK + 4))
def test_max_new_tokens(length):
    assert compare(dict, length=length) == continuation()[:length]


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, BLOCK + 2])
def test_max_length(length):
    new = compare(lambda: {"max_new_tokens": None, "max_length": START + length})
    assert new == continuation()[:length]


def test_max_new_tokens_beyond_reason_costs_nothing():
    """The bound of a call that ends by EOS may be astronomic; nothing of that size is allocated."""
    target, text = scene()
    torch.manual_seed(0)
    found, _ = run(
        target, taught(target, text), do_sample=True, top_k=1, max_new_tokens=10**12, eos_token_id=continuation()[7]
    )
    assert found[0, START:].tolist() == continuation()[:8]


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_max_time_is_over_after_the_first_token(seconds):
    assert compare(lambda: {"max_time": seconds}) == continuation()[:1]


@pytest.mark.parametrize("place", PLACES)
def test_max_time_inside_a_block(place, monkeypatch):
    """With a clock that ticks when asked, so that both sides run out of time at the same token."""

    def one_call() -> dict[str, Any]:
        ticks = iter(range(100))
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: float(next(ticks))))
        return {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(place + 0.5, initial_timestamp=0.0)])}

    assert compare(one_call) == continuation()[: min(place + 2, 12)]


def test_the_real_clock_stops_a_long_call():
    target, _ = scene()
    start = time.monotonic()
    run(target, tiny_drafter(target), max_new_tokens=200, max_time=0.05)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("eos_place", [1, BLOCK])
@pytest.mark.parametrize("minimum", [1, 2, 3, BLOCK + 1, BLOCK + 2, 2 * BLOCK])
def test_min_new_tokens_counts_tokens(eos_place, minimum):
    with complaints() as found:
        new = compare(lambda: {"eos_token_id": continuation()[eos_place], "min_new_tokens": minimum})
    assert len(new) >= min(minimum, 12)
    assert found == []


@pytest.mark.parametrize(
    ("events", "length"),
    [
        ({"max_new_tokens": 5, "eos": 6, "criterion": 7}, 5),
        ({"max_new_tokens": 9, "eos": 3, "criterion": 7}, 4),
        ({"max_new_tokens": 9, "eos": 6, "criterion": 3}, 4),
        ({"max_new_tokens": 9, "eos": 6, "criterion": 6}, 7),
    ],
)
def test_the_earliest_event_wins(events, length):
    def one_call() -> dict[str, Any]:
        return {
            "max_new_tokens": events["max_new_tokens"],
            "eos_token_id": continuation()[events["eos"]],
            "stopping_criteria": [StopAtToken(continuation()[events["criterion"]])],
        }

    assert compare(one_call) == continuation()[:length]


def test_a_normal_call_says_nothing():
    target, text = scene()
    with complaints() as found:
        run(target, taught(target, text), max_new_tokens=12)
        run(target, tiny_drafter(target), max_new_tokens=12)
        torch.manual_seed(0)
        run(target, taught(target, text), do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=12)
    assert found == []


# --- criteria of the user -------------------------------------------------------------------------------------------


class StopAtToken(StoppingCriteria):
    """Without state."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


class StopAtCall(StoppingCriteria):
    """Counts its calls and keeps what it was shown."""

    def __init__(self, calls: int):
        self.calls = calls
        self.seen: list[tuple[list[int], int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.full((input_ids.shape[0],), len(self.seen) >= self.calls)


@pytest.mark.parametrize("place", PLACES)
def test_a_stateless_criterion_at_every_offset(place):
    new = compare(lambda: {"stopping_criteria": StoppingCriteriaList([StopAtToken(continuation()[place])])})
    assert new == continuation()[: place + 1]


@pytest.mark.parametrize("wrong", [(), (2, 5), (1, 2, 3)], ids=["all accepted", "some refused", "most refused"])
@pytest.mark.parametrize("place", PLACES)
def test_a_counting_criterion_sees_what_plain_decoding_shows(place, wrong):
    seen = []

    def one_call() -> dict[str, Any]:
        criterion = StopAtCall(place + 1)
        seen.append(criterion.seen)
        return {"stopping_criteria": [criterion]}

    assert compare(one_call, wrong) == continuation()[: place + 1]
    plain, *ours = seen
    assert len(plain) == place + 1
    assert all(calls == plain for calls in ours)


@pytest.mark.parametrize(
    "asked", [{}, {"output_scores": True}, {"output_scores": True, "return_dict_in_generate": True}]
)
def test_a_criterion_gets_the_scores_of_plain_decoding(asked):
    target, text = scene()
    plain, ours = StopAtCall(7), StopAtCall(7)
    target.generate(PROMPT, **GREEDY, max_new_tokens=12, stopping_criteria=[plain], **asked)
    run(target, taught(target, text), max_new_tokens=12, stopping_criteria=[ours], **asked)
    assert ours.seen == plain.seen


def test_an_exception_in_a_criterion_reaches_the_user():
    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] > START + 3:
                raise RuntimeError("on purpose")
            return torch.zeros(1, dtype=torch.bool)

    target, text = scene()
    oracle = taught(target, text)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(target, oracle, max_new_tokens=12, stopping_criteria=[Broken()])
    assert run(target, oracle, max_new_tokens=12)[0].tolist() == text[:, : START + 12].tolist()


# --- stop strings ---------------------------------------------------------------------------------------------------


def strings_at(place: int) -> list[str]:
    """Stop strings that end with the token at `place`: that token, its first letter, one across a boundary."""
    before, token = (VOCABULARY[i] for i in (*PROMPT[0].tolist()[-1:], *continuation())[place : place + 2])
    return [token, token[0], before[-1] + token[0]]


@pytest.mark.parametrize("kind", range(3), ids=["token", "inside a token", "across two tokens"])
@pytest.mark.parametrize("place", PLACES)
def test_stop_strings_at_every_offset(place, kind):
    tokenizer = tiny_tokenizer()
    new = compare(lambda: {"stop_strings": [strings_at(place)[kind]], "tokenizer": tokenizer})
    assert len(new) <= place + 1


def test_one_stop_string_and_several():
    tokenizer = tiny_tokenizer()
    assert len(compare(lambda: {"stop_strings": strings_at(6)[2], "tokenizer": tokenizer})) == 7
    several = [strings_at(6)[2], strings_at(4)[2]]
    assert len(compare(lambda: {"stop_strings": several, "tokenizer": tokenizer})) == 5


def test_stop_strings_without_a_tokenizer_are_refused_as_ever():
    target, text = scene()
    with pytest.raises(ValueError, match="tokenizer"):
        run(target, taught(target, text), stop_strings=["a"], max_new_tokens=4)


# --- what is left after a stop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_the_cache_ends_where_the_text_ends(place):
    target, text = scene()
    asked = {"max_new_tokens": 12, "eos_token_id": continuation()[place], "return_dict_in_generate": True}
    plain = target.generate(PROMPT, **(GREEDY | asked))
    found, _ = run(target, taught(target, text), **asked)
    assert found.cache.get_seq_length() == plain.cache.get_seq_length() == START + place


def test_a_stop_on_the_first_token_drafts_nothing():
    target, text = scene()
    oracle = taught(target, text)
    _, stats = run(target, oracle, max_new_tokens=12, eos_token_id=continuation()[0])
    assert (stats.committed, stats.target_steps, stats.drafted, oracle.passes) == (1, 1, 0, 0)


def test_an_accepted_block_is_cut_in_the_statistics_too():
    target, text = scene()
    _, stats = run(target, taught(target, text), max_new_tokens=12, eos_token_id=continuation()[2])
    assert (stats.committed, stats.target_steps, stats.drafted, stats.accepted) == (3, 2, BLOCK, 2)
    assert stats.accepted_by_position == [1, 1, 0, 0]
