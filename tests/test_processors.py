"""Logits processors: each drafted position is judged on its own prefix, so greedy output is that of plain decoding.

The oracle is taught what plain decoding makes under the same processors, spoilt at some places.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import (
    BLOCK,
    PLAIN,
    PROMPT,
    VOCABULARY,
    complaints,
    continuation,
    run,
    scene,
    taught,
    tiny_drafter,
)
from scipy.stats import chisquare
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import RepetitionPenaltyLogitsProcessor

from flashmap_hf.candidates import Draft, FlashMapCandidateGenerator
from flashmap_hf.emission import emit
from flashmap_hf.verification import draw

START = PROMPT.shape[1]
LENGTH = 16
NEW = continuation()


class Shift(LogitsProcessor):
    """A user's own object: depends on how long the prefix is and on its last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(int(input_ids.shape[1] + input_ids[0, -1]) % 7, dims=-1)


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """A user's subclass of a processor of transformers."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids[:, START:], scores) if input_ids.shape[1] > START else scores


def even_ids(batch: int, input_ids: torch.Tensor) -> list[int]:
    return list(range(0, len(VOCABULARY), 2))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "repetition_penalty": lambda: {"repetition_penalty": 5.0},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda: {"bad_words_ids": [[NEW[2]], [NEW[5], NEW[6]]]},
    "sequence_bias": lambda: {"sequence_bias": [[[NEW[3]], -90.0], [[NEW[6], NEW[7]], -90.0]]},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": NEW[1], "eos_token_id": NEW[1], "min_new_tokens": 9},
    "suppress_tokens": lambda: {"suppress_tokens": [NEW[1], NEW[4], NEW[8]]},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": [NEW[0]]},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": even_ids},
    "min_new_tokens": lambda: {"min_new_tokens": 9, "eos_token_id": NEW[4]},
    "exponential_decay_length_penalty": lambda: {
        "exponential_decay_length_penalty": (2, 1.5),
        "eos_token_id": len(VOCABULARY) - 1,
    },
    "remove_invalid_values": lambda: {"remove_invalid_values": True, "suppress_tokens": [NEW[3]]},
    "renormalize_logits": lambda: {"renormalize_logits": True, "repetition_penalty": 5.0},
    "watermarking": lambda: {"watermarking_config": WatermarkingConfig(bias=8.0, seeding_scheme="selfhash")},
    "an object of the user": lambda: {"logits_processor": LogitsProcessorList([Shift()])},
    "a subclass of the user": lambda: {"logits_processor": [OwnPenalty(5.0)]},
    "several": lambda: {"repetition_penalty": 3.0, "suppress_tokens": [NEW[1]], "logits_processor": [Shift()]},
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_equals_plain(case):
    target, text = scene()
    plain = target.generate(PROMPT, **(PLAIN | {"max_new_tokens": LENGTH} | CASES[case]()))
    assert plain.tolist() != text[:, : plain.shape[1]].tolist(), "the processor changes nothing here"
    for wrong in ((), (START + 2, START + 3, START + 8)):
        oracle = taught(target, plain, wrong)
        found, stats = run(target, oracle, max_new_tokens=LENGTH, **CASES[case]())
        assert found.tolist() == plain.tolist()
        assert stats.accepted > 0
        assert stats.plain_calls == 0
    found, _ = run(target, tiny_drafter(target), max_new_tokens=LENGTH, **CASES[case]())
    assert found.tolist() == plain.tolist()


@pytest.mark.parametrize(
    "settings", [{"suppress_tokens": [7]}, {"bad_words_ids": [[7, 7]]}, {"no_repeat_ngram_size": 1}]
)
def test_drafts_are_processed_on_their_own_prefix(settings, monkeypatch):
    """A drafter that wants 7 for ever proposes what the processors leave of that."""
    target, text = scene()
    stubborn = text.clone()
    stubborn[:, START:] = 7
    blocks: list[list[int]] = []
    read = FlashMapCandidateGenerator.read

    def spied(self: FlashMapCandidateGenerator, *args: Any) -> Draft:
        found = read(self, *args)
        blocks.append(found.tokens.tolist())
        return found

    monkeypatch.setattr(FlashMapCandidateGenerator, "read", spied)
    run(target, taught(target, stubborn), max_new_tokens=2 + BLOCK, **settings)
    first = blocks[0]
    assert len(first) == BLOCK
    if "suppress_tokens" in settings:
        assert 7 not in first
    elif "bad_words_ids" in settings:
        assert [7, 7] not in [first[i : i + 2] for i in range(BLOCK - 1)]
        assert 7 in first
    else:
        assert first[0] == 7
        assert len(set(first)) == BLOCK


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_processed_drafts_obey_the_threshold(threshold):
    target, text = scene()
    oracle = taught(target, text)
    oracle.confidence = 6.0  # a probability of about 0.7: two in a row fall below 0.6
    _, stats = run(target, oracle, max_new_tokens=12, suppress_tokens=[0], assistant_confidence_threshold=threshold)
    assert len(stats.drafted_by_position) == (4 if threshold == 0.0 else 1)


# --- what the user's code is shown ----------------------------------------------------------------------------------


def visited(call: Callable[..., Any]) -> list[list[int]]:
    """The prefixes that a user's function is asked about."""
    seen: list[list[int]] = []

    def allowed(batch: int, input_ids: torch.Tensor) -> list[int]:
        seen.append(input_ids.tolist())
        return even_ids(batch, input_ids)

    call(allowed)
    return seen


@pytest.mark.parametrize("wrong", [(), (1,), (0, 2, 3), (1, 4, 5, 9)])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_prefix_function_sees_the_prefixes_of_plain_decoding(wrong, sampled):
    target, _ = scene()
    plain = target.generate(PROMPT, **PLAIN, prefix_allowed_tokens_fn=even_ids, max_new_tokens=LENGTH)
    oracle = taught(target, plain, [START + i for i in wrong])
    settings = {"do_sample": True, "top_k": 1} if sampled else {}
    expected = visited(lambda f: target.generate(PROMPT, **PLAIN, prefix_allowed_tokens_fn=f, max_new_tokens=LENGTH))
    found = visited(lambda f: run(target, oracle, prefix_allowed_tokens_fn=f, max_new_tokens=LENGTH, **settings))
    assert found == expected


@pytest.mark.parametrize("bad", ["raises", "allows nothing"])
def test_a_prefix_function_may_fail_on_what_plain_decoding_never_visits(bad):
    target, text = scene()
    path = text[0].tolist()

    def allowed(batch: int, input_ids: torch.Tensor) -> list[int]:
        prefix = input_ids.tolist()
        if prefix != path[: len(prefix)]:
            if bad == "raises":
                raise KeyError("no such state in the grammar")
            return []
        return list(range(len(VOCABULARY)))

    for drafter in (taught(target, text, [START + 2, START + 7]), tiny_drafter(target)):
        found, _ = run(target, drafter, prefix_allowed_tokens_fn=allowed, max_new_tokens=LENGTH)
        assert found[0].tolist() == path[: START + LENGTH]


def test_a_prefix_function_is_not_asked_behind_the_end():
    target, text = scene()
    eos = NEW[3]

    def allowed(batch: int, input_ids: torch.Tensor) -> list[int]:
        assert eos not in input_ids[START:].tolist(), "asked about a text that has ended"
        return list(range(len(VOCABULARY)))

    found, _ = run(
        target, taught(target, text), prefix_allowed_tokens_fn=allowed, max_new_tokens=LENGTH, eos_token_id=eos
    )
    assert found[0, START:].tolist() == NEW[:4]


class Grammar(LogitsProcessor):
    """Keeps state, as grammar engines do: it takes in the newest token of each call and must miss and repeat none."""

    def __init__(self) -> None:
        self.state = 0
        self.length: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self.length is None or input_ids.shape[1] == self.length + 1
        self.length = input_ids.shape[1]
        self.state = (3 * self.state + int(input_ids[0, -1])) % 11
        return scores.roll(self.state, dims=-1)


@pytest.mark.parametrize("wrong", [(), (1, 6), (0, 1, 2, 3)])
def test_a_processor_with_state_of_its_own(wrong):
    target, _ = scene()
    plain = target.generate(PROMPT, **PLAIN, logits_processor=[Grammar()], max_new_tokens=LENGTH)
    oracle = taught(target, plain, [START + i for i in wrong])
    found, stats = run(target, oracle, logits_processor=[Grammar()], max_new_tokens=LENGTH)
    assert found.tolist() == plain.tolist()
    assert stats.accepted > 0


@pytest.mark.parametrize("wrong", [(), (1, 6), (0, 1, 2, 3)])
def test_synthid_keeps_state_and_works(wrong):
    target, text = scene()
    mark = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3, sampling_table_size=64)
    settings = {"max_new_tokens": LENGTH, "watermarking_config": mark}
    plain = target.generate(PROMPT, **(PLAIN | settings))
    assert plain.tolist() != text[:, : START + LENGTH].tolist()
    oracle = taught(target, plain, [START + i for i in wrong])
    found, stats = run(target, oracle, **settings)
    assert found.tolist() == plain.tolist()
    assert stats.accepted > 0


# --- guidance -------------------------------------------------------------------------------------------------------


def test_guidance_decodes_plainly_and_says_so_once():
    target, text = scene()
    settings = {"guidance_scale": 1.5, "max_new_tokens": LENGTH}
    plain = target.generate(PROMPT, **PLAIN, **settings)
    oracle = taught(target, text)
    with complaints() as found:
        ours, stats = run(target, oracle, **settings)
    assert ours.tolist() == plain.tolist()
    assert len(found) == 1
    assert "guidance_scale" in found[0]
    assert "without the drafter" in found[0]
    assert oracle.passes == 0
    assert (stats.calls, stats.plain_calls, stats.committed, stats.tokens_per_step) == (1, 1, LENGTH, 1.0)


def test_guidance_of_one_is_none():
    target, text = scene()
    with complaints() as found:
        ours, stats = run(target, taught(target, text), guidance_scale=1.0, max_new_tokens=LENGTH)
    assert ours.tolist() == text[:, : START + LENGTH].tolist()
    assert (found, stats.plain_calls) == ([], 0)


# --- the law, where positions are decided one by one ----------------------------------------------------------------


class Identity(LogitsProcessor):
    """Not known to be pure."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def emitted(rule: str, processors: LogitsProcessorList, raw: torch.Tensor, q: torch.Tensor, times: int) -> Counter:
    """First two tokens of many blocks drafted from q; -1 where the second was left to the next block."""
    found: Counter = Counter()
    for _ in range(times):
        u = torch.rand(3, dtype=torch.float64)
        if rule == "one_hot":
            draft = Draft.of_chain(q.argmax(-1))
        else:
            tokens = draw(q, torch.rand(2, dtype=torch.float64))
            draft = Draft.of_chain(tokens, q if rule == "rejection" else None)
        pair = [int(one.token) for one in emit(rule, draft, raw, processors, PROMPT, u)][:2]
        found[tuple(pair + [-1] * (2 - len(pair)))] += 1
    return found


@pytest.mark.parametrize("rule", ["rejection", "one_hot", "shared_noise"])
def test_deciding_one_by_one_keeps_the_law(rule):
    """The first token follows p_0; given that the second came from the same block, it follows p_1."""
    torch.manual_seed(5)
    raw, q = torch.randn(3, 4), torch.randn(2, 4).softmax(-1)
    p = raw.softmax(-1)
    times = 1500
    found = emitted(rule, LogitsProcessorList([Identity()]), raw, q, times)
    first = torch.zeros(4)
    for (token, _), count in found.items():
        first[token] += count
    assert (
        chisquare(first.numpy(), (times * p[0]).numpy() * float(first.sum()) / float(times * p[0].sum())).pvalue > 1e-3
    )
    second = torch.zeros(4)
    for (_, token), count in found.items():
        if token >= 0:
            second[token] += count
    expected = (p[1] / p[1].sum() * second.sum()).double()
    assert chisquare(second.double().numpy(), (expected * second.double().sum() / expected.sum()).numpy()).pvalue > 1e-3


def test_one_by_one_equals_at_once_where_the_rule_is_deterministic():
    torch.manual_seed(6)
    raw = torch.randn(5, 9)
    none, own = LogitsProcessorList(), LogitsProcessorList([Identity()])
    for _ in range(50):
        u = torch.rand(5, dtype=torch.float64)
        draft = Draft.of_chain(torch.randint(0, 2, (4,)))
        for rule in ("greedy", "shared_noise"):
            raw[:, :2] += 1.0  # drafted tokens are accepted now and then
            at_once, one_by_one = (list(emit(rule, draft, raw, list_, PROMPT, u)) for list_ in (none, own))
            assert [(int(e.token), e.node) for e in at_once] == [(int(e.token), e.node) for e in one_by_one]
            for one, other in zip(at_once, one_by_one, strict=True):
                assert torch.equal(one.scores, other.scores)


def test_user_objects_are_left_as_they_were():
    target, text = scene()
    processors = LogitsProcessorList([Shift()])
    run(target, taught(target, text), logits_processor=processors, repetition_penalty=1.5, max_new_tokens=6)
    assert len(processors) == 1
