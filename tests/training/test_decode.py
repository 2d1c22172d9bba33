"""Batched decoding: the answers of plain generation, whatever is decoded beside them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from conftest import FAMILIES, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import AutoConfig

from flashmap_hf.training import row_cache
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.batch import Request
from flashmap_hf.training.decode import decode, decode_reference, end_ids

VOCAB = 64
STOP = list(range(3, VOCAB, 6))  # a fair share of the answers ends by itself
HYBRIDS: dict[str, dict[str, Any]] = {  # not every layer keeps keys and values
    "lfm2": {"num_key_value_heads": 2, "intermediate_size": 48, "layer_types": ["conv", "full_attention", "conv"]},
}


def requests_of(lengths: list[int], seed: int = 0, **fields: Any) -> list[Request]:
    """One request per length, of random tokens; fields given as lists are dealt out in turn."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        own = {name: value[i % len(value)] if isinstance(value, list) else value for name, value in fields.items()}
        made.append(Request(f"r{i}", ids, **own))
    return made


def generated(target: Any, request: Request, stop: list[int] | None) -> list[int]:
    ids = torch.tensor([request.prompt_ids])
    output = target.generate(
        ids, do_sample=False, max_new_tokens=request.max_new_tokens, eos_token_id=stop, pad_token_id=0
    )
    return output[0, ids.shape[1] :].tolist()


def by_id(answers: Iterable[Answer]) -> dict[str, Answer]:
    rows = list(answers)
    found = {answer.id: answer for answer in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_greedy_equals_generate(family: str) -> None:
    target = tiny_target(family, **HYBRIDS.get(family, {}))
    assert (row_cache.row_cache(target.config) is None) == (family in HYBRIDS)
    requests = requests_of([3, 1, 9, 5, 5, 14], max_new_tokens=[9, 1, 13, 4])
    answers = by_id(decode(target, requests, batch_size=3, stop_ids=STOP))
    for request in requests:
        answer = answers.pop(request.id)
        assert answer.response_ids == generated(target, request, STOP), request
        assert (answer.prompt_ids, answer.temperature) == (request.prompt_ids, 0.0)
    assert not answers


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_buffers_that_fill_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "SPARE", 4)
    target = tiny_target(family)
    requests = requests_of([2, 14, 3, 20, 2], max_new_tokens=[24, 10, 5, 18, 24])
    answers = by_id(decode(target, requests, batch_size=3))
    for request in requests:
        assert answers[request.id].response_ids == generated(target, request, None)


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    limits=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3),
    batch_size=st.integers(1, 4),
    family=st.sampled_from(["llama", "gemma2"]),
)
def test_equals_the_reference(
    lengths: list[int], limits: list[int], temperatures: list[float], batch_size: int, family: str
) -> None:
    target = TARGETS.setdefault(family, tiny_target(family))
    requests = requests_of(lengths, max_new_tokens=limits, temperature=temperatures)
    answers = by_id(decode(target, requests, batch_size=batch_size, seed=3, stop_ids=STOP[:3]))
    assert answers == {r.id: decode_reference(target, r, seed=3, stop_ids=STOP[:3]) for r in requests}


TARGETS: dict[str, Any] = {}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "lfm2"])
def test_an_answer_does_not_depend_on_its_batch(family: str) -> None:
    target = tiny_target(family, **HYBRIDS.get(family, {}))
    requests = requests_of([6, 2, 6, 11, 3], max_new_tokens=[9, 3, 12], temperature=[1.0, 0.0, 0.7])
    state = torch.get_rng_state()
    alone = by_id(decode(target, requests, batch_size=1))
    together = by_id(decode(target, requests[::-1], batch_size=5))
    reseeded = by_id(decode(target, requests, batch_size=5, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert alone == together == {r.id: decode_reference(target, r) for r in requests}
    for request in requests:
        assert (alone[request.id] == reseeded[request.id]) == (request.temperature == 0)


def test_the_law_is_the_softmax_at_the_temperature() -> None:
    """Two tokens of many answers to one prompt, against all pairs; and the noise of neighbours is independent."""
    target, count = tiny_target(vocab_size=6), 3000
    prompt, temperature = [3, 4, 5, 3], 1.7
    requests = [Request(str(i), prompt, temperature, 2) for i in range(count)]
    drawn = Counter(tuple(a.response_ids) for a in decode(target, requests, batch_size=500))
    with torch.no_grad():
        first = (target(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
        after = target(torch.tensor([[*prompt, y] for y in range(6)])).logits[:, -1].double() / temperature
        law = first[:, None] * after.softmax(-1)
    expected, observed, rare = [], [], [0.0, 0]
    for pair, share in ((divmod(i, 6), float(p)) for i, p in enumerate(law.flatten())):
        if share * count < 5:
            rare = [rare[0] + share * count, rare[1] + drawn[pair]]
        else:
            expected.append(share * count)
            observed.append(drawn[pair])
    assert len(expected) > 8
    if rare[0] >= 5:
        expected.append(rare[0])
        observed.append(rare[1])
    else:
        expected[0] += rare[0]
        observed[0] += rare[1]
    assert chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("eos", [7, [7, 9], torch.tensor([7, 9]), None])
def test_the_targets_own_end(eos: Any) -> None:
    target = tiny_target(seed=1)
    target.generation_config.eos_token_id = eos
    ids = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
    assert end_ids(target) == ids
    requests = requests_of([4] * 12, max_new_tokens=40, temperature=1.0)
    answers = list(decode(target, requests, batch_size=5))
    for answer in answers:
        inside, last = answer.response_ids[:-1], answer.response_ids[-1]
        assert not set(inside) & set(ids)
        assert last in ids or len(answer.response_ids) == 40
    assert any(answer.response_ids[-1] in ids for answer in answers) == (eos is not None)


def test_finished_rows_leave_and_new_ones_take_their_places() -> None:
    target = tiny_target()
    rows: list[int] = []
    hook = target.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    requests = requests_of([3] * 13, max_new_tokens=[20, *[3] * 12])
    order = [answer.id for answer in decode(target, requests, batch_size=4)]
    hook.remove()
    assert order[-1] == "r0" and sorted(order) == sorted(r.id for r in requests)
    # prefill and two steps with all; three times a prefill of three rows and two steps; the longest one alone
    assert rows == [4, 4, 4] + [3, 4, 4] * 3 + [1] * 11


def test_requests_are_read_as_places_become_free() -> None:
    target, taken = tiny_target(), []

    def endless() -> Iterator[Request]:
        for i in range(10**9):
            taken.append(i)
            yield Request(str(i), [5], max_new_tokens=2)

    answers = decode(target, endless(), batch_size=3)
    assert [next(answers).id for _ in range(6)] == ["0", "1", "2", "3", "4", "5"]
    assert len(taken) <= 9


def test_the_mode_of_the_target_is_put_back() -> None:
    target = tiny_target("gpt2", resid_pdrop=0.5)
    requests = requests_of([3, 4], max_new_tokens=6)
    expected = by_id(decode(target, requests))
    target.train()
    target.transformer.h[0].eval()
    modes = [module.training for module in target.modules()]
    assert by_id(decode(target, requests)) == expected
    assert [module.training for module in target.modules()] == modes
    answers = decode(target, requests)
    next(answers)
    answers.close()
    assert [module.training for module in target.modules()] == modes
    assert decode_reference(target, requests[0]) == expected["r0"]
    assert [module.training for module in target.modules()] == modes


def test_a_target_with_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    requests = requests_of([3, 5], max_new_tokens=6, temperature=[0.0, 1.0])
    expected = by_id(decode(target, requests))
    monkeypatch.setattr(type(target), "_supports_default_dynamic_cache", classmethod(lambda cls: False))
    assert by_id(decode(target, requests)) == expected


def test_chunked_attention_counts_columns() -> None:
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=2, attention_chunk_size=8)
    assert row_cache.row_cache(config) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 500}, "at most 482 new tokens"),
        ({"prompt_ids": [5] * 600}, "shorten the prompt"),
        ({"prompt_ids": [VOCAB]}, "below the target's 64 tokens"),
        ({"prompt_ids": [-1]}, "below the target's 64 tokens"),
    ],
)
def test_what_cannot_be_decoded_is_named(fields: dict[str, Any], message: str) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=f"request x: .*{message}"):
        list(decode(target, [Request(**{"id": "x", "prompt_ids": [5] * 30} | fields)]))
    with pytest.raises(ValueError, match="batch_size=0"):
        list(decode(target, [], batch_size=0))
    assert list(decode(target, [])) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_law(temperature: float) -> None:
    target = tiny_target()
    target.lm_head.weight.data[3] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        list(decode(target, requests_of([3], temperature=temperature)))
