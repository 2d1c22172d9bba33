"""The baselines through transformers' own assisted decoding: the target's text, the target's law, their accounts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import difference, inputs_of, random_prompt, tiny_target
from scipy.stats import chi2
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import flashmap_hf
from flashmap_hf import FlashMapConfig, FlashMapDrafter
from flashmap_hf.conditioning import tap
from flashmap_hf.evaluation.baselines import CLASSES, KINDS, Baseline, BaselineConfig, load, sized_like, stock_loop
from flashmap_hf.evaluation.baselines.dflash import DFlashAssistant
from flashmap_hf.evaluation.baselines.sizing import count_parameters
from flashmap_hf.evaluation.baselines.stock_loop import assisted

K, W = 3, 4
V = 4  # of the target whose law is enumerated
SHAPE = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}


def make(kind: str, target: Any, seed: int = 0, **overrides: Any) -> Baseline:
    """An untrained one; its weights are large, so that its drafts differ from place to place."""
    text = target.config
    fields = {
        "kind": kind, "block_size": K, "window": W, "target_hidden_size": text.hidden_size, "num_hidden_layers": 2,
        "target_num_layers": text.num_hidden_layers, "vocab_size": text.vocab_size, "initializer_range": 0.5,
        "tap_layers": [1, text.num_hidden_layers], "mask_token_id": text.vocab_size - 1,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = CLASSES[kind](BaselineConfig(**(SHAPE | fields | overrides)))
        for parameter in drafter.parameters():
            if parameter.ndim == 2 and not parameter.any():  # the heads of medusa start at zero
                torch.nn.init.normal_(parameter, std=0.5)
    return Baseline(drafter.eval())


def plain(target: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return target.generate(**inputs, do_sample=False, **options)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Every block that is drafted: how many tokens were committed before it, and what it proposes."""
    seen: list[tuple[int, list[int]]] = []
    original = stock_loop.Recorded.get_candidates

    def get_candidates(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        ids, logits = original(self, input_ids, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            seen.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    monkeypatch.setattr(stock_loop.Recorded, "get_candidates", get_candidates)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "padding", "options"),
    [
        (1, 0, {"max_new_tokens": 20}),
        (5, 3, {"max_new_tokens": 20}),
        (40, 0, {"max_new_tokens": 20, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
        *[(6, 0, {"max_new_tokens": n}) for n in range(1, K + 3)],
    ],
)
def test_greedy_text_is_that_of_plain_generate(
    tiny_llama: Any, kind: str, length: int, padding: int, options: dict[str, Any]
) -> None:
    inputs = random_prompt(length, 64, seed=length, padding=padding)
    expected = plain(tiny_llama, inputs, **options)
    before = json.dumps(tiny_llama.generation_config.to_dict(), default=str)
    for draft_vocab in (None, 32):
        baseline = make(kind, tiny_llama, draft_vocab_size=draft_vocab)
        found = baseline.generate(tiny_llama, inputs, do_sample=False, **options)
        assert torch.equal(found, expected), difference(tiny_llama, expected, found, padding)
    assert json.dumps(tiny_llama.generation_config.to_dict(), default=str) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mistral"])
def test_other_families(kind: str, family: str) -> None:
    target = tiny_target(family)
    inputs = random_prompt(12, 64, seed=2)
    expected = plain(target, inputs, max_new_tokens=24)
    found = make(kind, target).generate(target, inputs, do_sample=False, max_new_tokens=24)
    assert torch.equal(found, expected), difference(target, expected, found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_inside_a_block_ends_the_text_and_is_counted(
    tiny_llama: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that proposes the right text: the block is cut at the end token, which it proposed."""
    inputs = random_prompt(6, 64, seed=5)
    text = plain(tiny_llama, inputs, max_new_tokens=12)
    baseline = make(kind, tiny_llama)
    original = baseline.drafter.candidates

    def right(*args: Any) -> Any:
        inner = original(*args)
        ask = inner.get_candidates

        def get_candidates(input_ids: Any, **kwargs: Any) -> Any:
            ids, _ = ask(input_ids, **kwargs)
            return text[:, : ids.shape[1]] if torch.equal(text[:, : input_ids.shape[1]], input_ids) else ids, None

        inner.get_candidates = get_candidates
        return inner

    monkeypatch.setattr(baseline.drafter, "candidates", right)
    place = 6 + 1 + K + 2 - 1  # the second of the second block
    end = int(text[0, place])
    assert end not in text[0, 6:place].tolist()
    with flashmap_hf.record() as stats:
        found = baseline.generate(tiny_llama, inputs, do_sample=False, max_new_tokens=12, eos_token_id=end)
    assert torch.equal(found, plain(tiny_llama, inputs, max_new_tokens=12, eos_token_id=end))
    assert found[0, -1] == end
    assert (stats.committed, stats.target_steps, stats.drafted) == (found.shape[1] - 6, 3, 2 * K)
    assert stats.accepted == stats.committed - 2  # the prefill's token and the first bonus token were not drafted


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_stream_agree_with_the_text(
    tiny_llama: Any, kind: str, blocks: list[tuple[int, list[int]]]
) -> None:
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    inputs, streamer = random_prompt(8, 64, seed=3), Streamer()
    with flashmap_hf.record() as stats:
        found = make(kind, tiny_llama).generate(
            tiny_llama, inputs, streamer=streamer, do_sample=False, max_new_tokens=60
        )
    assert streamer.tokens == found[0].tolist() and streamer.ended == 1
    assert (stats.calls, stats.committed, stats.blocks) == (1, 60, len(blocks))
    assert stats.target_steps == stats.committed - stats.accepted
    assert stats.drafted == stats.nodes == sum(len(tokens) for _, tokens in blocks)
    kept = 0
    for length, tokens in blocks:
        right = [a == b for a, b in zip(tokens, found[0, length:].tolist(), strict=False)]
        kept += right.index(False) if False in right else len(right)
    assert stats.accepted == kept
    assert stats.seconds_drafter > 0 and 0 < stats.seconds_prefill < stats.seconds_target


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("prompt_length", [1, 3, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_drafts_what_training_computes(
    tiny_llama: Any, kind: str, prompt_length: int, padding: int, blocks: list[tuple[int, list[int]]]
) -> None:
    """One pass for training and inference: rolling windows and caches hold what is computed from the whole text."""
    baseline = make(kind, tiny_llama, window=W)
    inputs = random_prompt(prompt_length, 64, seed=prompt_length, padding=padding)
    text = baseline.generate(tiny_llama, inputs, do_sample=False, max_new_tokens=30)[:, padding:]
    states = tiny_llama(text, output_hidden_states=True).hidden_states
    drafter, embeddings = baseline.drafter, tiny_llama.get_input_embeddings().weight
    taps = tap(states, drafter.config.tap_layers or [])
    assert len(blocks) > 5
    for length, tokens in blocks:
        anchor = length - padding - 1
        seen = taps.new_zeros(1, W, taps.shape[-1])
        mask, following = torch.zeros(1, W, dtype=torch.bool), torch.zeros(1, W, dtype=torch.long)
        count = min(W, anchor)
        seen[0, W - count :], mask[0, W - count :] = taps[0, anchor - count : anchor], True
        following[0, W - count :] = text[0, anchor - count + 1 : anchor + 1]
        labels = torch.tensor([tokens + [0] * (K - len(tokens))])[None]
        endpoints = drafter.endpoints(seen, mask, following, labels, embeddings)
        logits = drafter.head(endpoints, baseline.drafter.rows(tiny_llama))[0]
        assert logits.argmax(-1)[: len(tokens)].tolist() == tokens


def test_dflash_runs_through_stock_generate_alone(tiny_llama: Any) -> None:
    """Without a draft vocabulary nothing of ours but the drafter is needed; the blocks are the same."""
    baseline = make("dflash", tiny_llama)
    inputs = random_prompt(9, 64, seed=4)
    calls: list[int] = []
    handle = tiny_llama.register_forward_hook(lambda *_: calls.append(1))
    stock = tiny_llama.generate(
        **inputs, assistant_model=DFlashAssistant(baseline.drafter), speculation_type="dflash", do_sample=False,
        max_new_tokens=40,
    )  # fmt: skip
    steps = len(calls)
    with flashmap_hf.record() as stats:
        found = baseline.generate(tiny_llama, inputs, do_sample=False, max_new_tokens=40)
    handle.remove()
    assert torch.equal(stock, found) and torch.equal(found, plain(tiny_llama, inputs, max_new_tokens=40))
    assert stats.target_steps == steps == len(calls) - steps


def law_target() -> Any:
    """Its next token depends on the last two alone: one layer, a sliding window of two."""
    return tiny_target(
        "mistral", vocab_size=V, num_hidden_layers=1, sliding_window=2, max_position_embeddings=2**14,
        pad_token_id=None, bos_token_id=None, initializer_range=0.12,
    )  # fmt: skip


@torch.no_grad()
def two_token_law(target: Any, temperature: float) -> torch.Tensor:
    """`[V * V, V * V]`: the law of two tokens after each pair, enumerated."""
    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    first = (target(pairs).logits[:, -1].double() / temperature).softmax(-1)
    longer = torch.cat([pairs.repeat_interleave(V, 0), torch.arange(V).repeat(V * V)[:, None]], dim=1)
    second = (target(longer).logits[:, -1].double() / temperature).softmax(-1)
    return (first.reshape(-1, 1) * second).reshape(V * V, V * V)


def p_value(target: Any, baseline: Baseline, temperature: float, tokens: int) -> tuple[float, flashmap_hf.Statistics]:
    """Chi-square of the windows of one long call; cells that expect fewer than five are pooled."""
    law = two_token_law(target, temperature)
    torch.manual_seed(7)
    with flashmap_hf.record() as stats:
        text = baseline.generate(
            target, inputs_of(1, 2), do_sample=True, top_k=0, temperature=temperature, max_new_tokens=tokens
        )[0]
    starts = torch.arange(0, len(text) - 3, 2)  # windows in every alignment to the blocks
    before, after = (text[starts + i] * V + text[starts + i + 1] for i in (0, 2))
    counts = torch.zeros(V * V, V * V, dtype=torch.float64)
    counts.index_put_((before, after), torch.ones(len(starts), dtype=torch.float64), accumulate=True)
    statistic, freedom = 0.0, 0
    for row, probabilities in zip(counts, law, strict=True):
        expected = row.sum() * probabilities
        large = expected >= 5
        cells = [(float(o), float(e)) for o, e in zip(row[large], expected[large], strict=True)]
        rest = (float(row[~large].sum()), float(expected[~large].sum()))
        if rest[1] >= 5:
            cells.append(rest)
        elif cells:
            cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
        if len(cells) > 1:
            statistic += sum((o - e) ** 2 / e for o, e in cells)
            freedom += len(cells) - 1
    assert freedom > 20
    return float(chi2.sf(statistic, freedom)), stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_text_has_the_law_of_the_target(kind: str, temperature: float) -> None:
    target = law_target()
    baseline = make(kind, target, tap_layers=[1], draft_vocab_size=V - 1)
    with torch.no_grad():
        baseline.drafter.head.readout_scale.fill_(0.5)  # a flatter law: some drafts are kept at every position
    p, stats = p_value(target, baseline, temperature, tokens=1200)
    assert all(0 < a < d for a, d in zip(stats.accepted_by_position, stats.drafted_by_position, strict=True))
    assert p > 1e-4


def test_a_law_other_than_the_one_drawn_from_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth: a drafter that reports another law than its own spoils the text."""
    target = law_target()
    baseline = make("medusa", target, tap_layers=[1])
    original = stock_loop.Recorded.get_candidates

    def get_candidates(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        ids, logits = original(self, input_ids, **kwargs)
        return ids, None if logits is None else torch.zeros_like(logits)

    monkeypatch.setattr(stock_loop.Recorded, "get_candidates", get_candidates)
    assert p_value(target, baseline, 1.0, tokens=1200)[0] < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(tiny_llama: Any, kind: str, tmp_path: Path) -> None:
    baseline = make(kind, tiny_llama, draft_vocab_size=20)
    baseline.drafter.head.draft_vocab_ids.copy_(torch.arange(1, 60, 3))
    baseline.drafter.save_pretrained(tmp_path)
    again = load(tmp_path, tiny_llama)
    assert again.name == kind
    facts = [
        {n: v for n, v in b.drafter.config.to_dict().items() if n not in ("_name_or_path", "dtype", "architectures")}
        for b in (baseline, again)
    ]
    assert facts[0] == facts[1]
    before, after = baseline.drafter.state_dict(), again.drafter.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())
    assert not again.drafter.training
    half = tiny_target("llama", dtype=torch.bfloat16)
    found = load(tmp_path, half).generate(half, random_prompt(5, 64, seed=1), do_sample=False, max_new_tokens=9)
    assert load(tmp_path, half).drafter.dtype == torch.bfloat16 and found.shape == (1, 14)


def test_a_folder_of_another_kind_or_target_is_refused(tiny_llama: Any, tmp_path: Path) -> None:
    FlashMapDrafter.from_target(tiny_llama, num_hidden_layers=1).save_pretrained(tmp_path / "flashmap")
    with pytest.raises(OSError, match="holds a model of type 'flashmap', not a baseline"):
        load(tmp_path / "flashmap", tiny_llama)
    with pytest.raises(OSError, match="no such folder"):
        load(tmp_path / "nothing", tiny_llama)
    baseline = make("medusa", tiny_llama)
    baseline.drafter.save_pretrained(tmp_path / "medusa")
    other = tiny_target("llama", vocab_size=48)
    with pytest.raises(ValueError, match="vocabulary size 64"):
        load(tmp_path / "medusa", other)
    with pytest.raises(ValueError, match="vocabulary size 64"):
        baseline.generate(other, inputs_of(3, 4))
    (tmp_path / "medusa" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(OSError, match=r"model\.safetensors is truncated or damaged"):
        load(tmp_path / "medusa", tiny_llama)


def test_values_out_of_range_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="kind='lookahead': choose one of dflash, eagle, medusa"):
        BaselineConfig(kind="lookahead")
    with pytest.raises(ValueError, match="mask_token_id=64"):
        make("dflash", tiny_llama, mask_token_id=64)
    with pytest.raises(ValueError, match="head='shared'"):
        make("eagle", tiny_llama, transition_rank=4)
    with pytest.raises(ValueError, match="the heads read the final hidden state"):
        make("medusa", tiny_llama, tap_layers=[1, 2])
    with pytest.raises(ValueError, match="wraps a model"):
        assisted(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


LIKE = [
    {},
    {"num_hidden_layers": 3, "block_size": 4, "draft_vocab_size": 8192, "tap_layers": [8, 15, 22, 30]},
    {"num_hidden_layers": 6, "block_size": 8, "transition_rank": 128, "draft_vocab_size": 8192},
    {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"head": "low_rank", "head_rank": 64, "draft_vocab_size": 8192},
    {"target_hidden_size": 2048, "target_num_layers": 16, "vocab_size": 128256, "num_hidden_layers": 5},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", LIKE)
def test_sized_like_a_drafter(kind: str, fields: dict[str, Any]) -> None:
    like = FlashMapConfig(**fields)
    config = sized_like(kind, like)
    wanted = count_parameters(FlashMapDrafter, like)
    assert abs(count_parameters(CLASSES[kind], config) / wanted - 1) <= 0.1
    assert (config.block_size, config.window, config.draft_vocab_size) == (
        like.block_size, like.window, like.draft_vocab_size
    )  # fmt: skip


def test_what_cannot_be_as_small_is_refused() -> None:
    tiny = FlashMapConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                          num_key_value_heads=1, head_dim=2, block_size=64)  # fmt: skip
    with pytest.raises(ValueError, match="compare with a larger one"):
        sized_like("medusa", tiny)
    with pytest.raises(ValueError, match="choose one of"):
        sized_like("lookahead", tiny)


@pytest.mark.parametrize("kind", KINDS)
def test_the_account_of_bytes(tiny_llama: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as in the file; the state is at least what is really kept, and no longer grows past the window."""
    baseline = make(kind, tiny_llama)
    assert baseline.parameters == count_parameters(CLASSES[kind], baseline.drafter.config)
    assert baseline.weight_bytes == 4 * baseline.parameters
    generators: list[Any] = []
    original = baseline.drafter.candidates

    def candidates(*args: Any) -> Any:
        generators.append(original(*args))
        return generators[-1]

    monkeypatch.setattr(baseline.drafter, "candidates", candidates)
    for context in (3, 60):
        baseline.generate(tiny_llama, random_prompt(context - 2, 64, seed=1), do_sample=False, max_new_tokens=9)
        generator = generators[-1]
        if kind == "dflash":
            tensors = [t for layer in generator.cache.layers for t in (layer.keys, layer.values)]
        elif kind == "eagle":
            tensors = [*generator.context, generator.newest]
        else:
            tensors = [generator.final]
        assert sum(t.numel() * t.element_size() for t in tensors) <= baseline.state_bytes(context + 7)
        assert all(t.untyped_storage().nbytes() <= 4 * t.numel() for t in tensors if kind != "dflash")
    assert baseline.state_bytes(512) == baseline.state_bytes(4096) > 0
    assert make(kind, tiny_llama).drafter.bfloat16().dtype.itemsize == 2
