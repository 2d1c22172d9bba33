"""Plain decoding and FlashMap side by side."""

import dataclasses
import json

import pytest
import torch
from conftest import oracle_for, tiny_drafter, tiny_target
from rich.console import Console
from tiny_files import byte_tokenizer
from transformers import LlamaForCausalLM, TextStreamer

from flashmap_hf import compare as compare_module
from flashmap_hf.compare import Spread, compare, first_difference
from flashmap_hf.comparison_table import ROWS, print_comparison, show_text
from flashmap_hf.prompts import encode
from flashmap_hf.runs import Run, Settings, run

TOKENIZER = byte_tokenizer()
SETTINGS = Settings(max_new_tokens=12)
PROMPTS = {"chat": "Hi", "code": "x = 1"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", vocab_size=len(TOKENIZER))


@pytest.fixture(scope="module")
def untrained(target):
    """A comparison with a drafter that nothing is accepted of, as it is but for chance."""
    return compare(target, TOKENIZER, tiny_drafter(target, tokenizer=TOKENIZER), PROMPTS, SETTINGS, rounds=3)


def text_of(comparison) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        print_comparison(comparison, console)
    return captured.get()


class Derailed(LlamaForCausalLM):
    """A target whose drafted output leaves the plain one at the third new token."""

    def generate(self, *args, **kwargs):
        output = super().generate(*args, **kwargs)
        if kwargs.get("assistant_model") is not None:
            place = kwargs["input_ids"].shape[1] + 2
            output[0, place] = (output[0, place] + 1) % self.config.vocab_size
        return output


def test_each_prompt_is_measured(untrained):
    assert [result.name for result in untrained.prompts] == list(PROMPTS)
    for result in untrained.prompts:
        assert result.prompt == PROMPTS[result.name]
        assert result.prompt_tokens == len(f"user: {result.prompt}\n") + 1
        assert result.plain_new_tokens == result.flashmap_new_tokens == 12
        assert result.identical is True
        assert result.difference is None
        assert 1.0 <= result.tokens_per_step <= 12
        assert len(result.acceptance_by_position) == 5
        assert result.drafter_share == result.drafter_ms / result.plain_step_ms
        assert min(result.verify_step_ms, result.prompt_lookup_tokens_per_step) > 0
        for spread in (result.plain_tokens_per_second, result.flashmap_tokens_per_second, result.speedup):
            assert 0 < spread.lowest <= spread.median <= spread.highest
    assert untrained.speedup == pytest.approx(sum(result.speedup.median for result in untrained.prompts) / 2)
    assert (untrained.target_dtype, untrained.drafter_dtype, untrained.device) == ("float32", "float32", "cpu")


def test_it_becomes_json_with_its_provenance(untrained):
    read = json.loads(json.dumps(untrained.to_dict(), allow_nan=False))
    assert read["prompts"][0]["speedup"].keys() == {"median", "lowest", "highest"}
    assert read["settings"] == dataclasses.asdict(SETTINGS)
    assert (read["rounds"], read["prompt_lookup_tokens"]) == (3, 10)
    assert {"commit", "versions", "command", "machine", "time"} <= read["provenance"].keys()


def test_accepted_tokens_show(target):
    drafter = oracle_for(target, tokenizer=TOKENIZER)
    inputs = encode(target, TOKENIZER, PROMPTS["chat"])
    plain = run(target, inputs, SETTINGS.generation_config(), seed=0)
    drafter.teach(target, torch.cat([inputs["input_ids"], torch.tensor([plain.tokens])], dim=1))
    (result,) = compare(target, TOKENIZER, drafter, {"chat": PROMPTS["chat"]}, SETTINGS, rounds=2).prompts
    assert result.identical is True
    assert result.tokens_per_step > 1.5
    assert 0.5 < result.acceptance_by_position[0] < 1
    assert result.acceptance_by_position == sorted(result.acceptance_by_position, reverse=True)
    assert result.text == TOKENIZER.decode(plain.tokens, skip_special_tokens=True)


def test_prompt_lookup_is_counted_in_forwards():
    """A target that repeats one token for ever is what prompt lookup is best at."""
    target = tiny_target("llama", vocab_size=len(TOKENIZER))
    drafter = tiny_drafter(target, tokenizer=TOKENIZER)
    with torch.no_grad():
        target.lm_head.weight.zero_()  # all logits are equal: the argmax is id 0
    settings = Settings(max_new_tokens=24)
    prompts = {"repeating": "aaaa"}
    for tokens in (4, 8):
        (result,) = compare(
            target, TOKENIZER, drafter, prompts, settings, rounds=1, prompt_lookup_tokens=tokens
        ).prompts
        assert 1.5 < result.prompt_lookup_tokens_per_step <= tokens + 1
    (result,) = compare(target, TOKENIZER, drafter, prompts, settings, rounds=1, prompt_lookup_tokens=0).prompts
    assert result.prompt_lookup_tokens_per_step is None


def test_the_runs_are_interleaved_after_a_warm_up(target, monkeypatch):
    calls = []

    def recorded(*args, streamer=None, **kwargs):
        side = "lookup" if args[2].prompt_lookup_num_tokens else "F" if kwargs.get("assistant_model") else "p"
        calls.append(side + ("~" if streamer else ""))
        return run(*args, streamer=streamer, **kwargs)

    monkeypatch.setattr(compare_module, "run", recorded)
    drafter = tiny_drafter(target, tokenizer=TOKENIZER)
    settings = Settings(max_new_tokens=3)
    compare(target, TOKENIZER, drafter, PROMPTS, settings, rounds=2, show=show_text(TOKENIZER))
    assert calls == ["p~", "F~", "p", "F", "p", "F", "lookup"] * 2


def test_the_speedup_is_the_median_of_each_rounds_own_ratio():
    """A machine that slows down half-way slows both sides of a round."""
    measured = compare_module.Measured(prompt_tokens=1)
    for seconds in (1.0, 4.0, 2.0):
        measured.plain.append(Run([1] * 8, seconds, [0.5 * seconds, 0.1 * seconds, 0.1 * seconds]))
        measured.flashmap.append(Run([1] * 8, seconds / 2, [0.5 * seconds, 0.2 * seconds]))
        measured.drafter_ms.append(20.0 * seconds)
    summary = measured.summary()
    assert summary["speedup"] == Spread(2.0, 2.0, 2.0)
    assert summary["plain_tokens_per_second"] == Spread(4.0, 2.0, 8.0)
    assert summary["tokens_per_step"] == 4.0
    assert summary["plain_step_ms"] == pytest.approx(200)
    assert summary["verify_step_ms"] == pytest.approx(400)
    assert summary["drafter_share"] == pytest.approx(0.2)


def test_outputs_of_other_lengths_are_compared_by_their_rate():
    measured = compare_module.Measured(prompt_tokens=1)
    measured.plain.append(Run([1] * 10, 1.0, [0.1] * 10))
    measured.flashmap.append(Run([1] * 20, 1.0, [0.1] * 10))
    assert measured.summary()["speedup"].median == 2.0


def test_one_token_has_no_step_to_time(target):
    settings = Settings(max_new_tokens=1)
    drafter = tiny_drafter(target, tokenizer=TOKENIZER)
    comparison = compare(target, TOKENIZER, drafter, {"chat": "Hi"}, settings, rounds=1)
    (result,) = comparison.prompts
    assert result.plain_step_ms is result.verify_step_ms is result.drafter_ms is result.drafter_share is None
    assert result.tokens_per_step == 1.0
    assert "identical" in text_of(comparison)


def test_a_sample_is_not_compared(target):
    settings = Settings(max_new_tokens=8, temperature=1.0, seed=3)
    before = torch.get_rng_state()
    comparison = compare(
        target, TOKENIZER, tiny_drafter(target, tokenizer=TOKENIZER), {"chat": "Hi"}, settings, rounds=2
    )
    assert comparison.prompts[0].identical is None
    assert "not compared" in text_of(comparison)
    assert "temperature 1" in text_of(comparison)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_difference_is_found_with_the_targets_margin():
    plain_target = tiny_target("llama", vocab_size=len(TOKENIZER))
    target = Derailed(plain_target.config).eval()
    target.load_state_dict(plain_target.state_dict())
    drafter = tiny_drafter(target, tokenizer=TOKENIZER)
    comparison = compare(target, TOKENIZER, drafter, {"chat": "Hi"}, SETTINGS, rounds=1)
    (result,) = comparison.prompts
    assert result.identical is False
    assert result.difference is not None
    assert result.difference.position == 2

    inputs = encode(target, TOKENIZER, "Hi")
    tokens = run(plain_target, inputs, SETTINGS.generation_config(), seed=0).tokens
    assert result.difference.plain_token == tokens[2] != result.difference.flashmap_token
    with torch.no_grad():
        logits = target(torch.cat([inputs["input_ids"], torch.tensor([tokens[:2]])], dim=1)).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert result.difference.margin == pytest.approx(best - second, abs=1e-5)
    text = text_of(comparison)
    assert "no, token 3" in text
    assert f"margin there         {best - second:.2g}" in text


def test_a_shorter_output_differs_where_it_ends(target):
    inputs = encode(target, TOKENIZER, "Hi")["input_ids"]
    difference = first_difference(target, inputs, [5, 6], [5, 6, 7], SETTINGS)
    assert difference is not None
    assert (difference.position, difference.plain_token, difference.flashmap_token) == (2, None, 7)
    assert first_difference(target, inputs, [5, 6], [5, 6], SETTINGS) is None


def test_the_table_shows_every_number_in_80_columns(untrained):
    results = [*untrained.prompts, dataclasses.replace(untrained.prompts[0], name="maths")]
    lines = text_of(dataclasses.replace(untrained, prompts=results)).splitlines()
    rows = {
        line[: len(label) + 2].strip(): line
        for label in ROWS
        for line in lines
        if line.strip().startswith(label.strip())
    }
    assert rows.keys() == {label.strip() for label in ROWS}
    first = results[0]
    assert f"{first.speedup.median:.2f} ({first.speedup.lowest:.2f}-{first.speedup.highest:.2f})" in rows["speed-up"]
    assert rows["of a plain step"].count(f"{first.drafter_share:.0%}") >= 2
    assert rows["identical"].split() == ["identical", "yes", "yes", "yes"]
    assert rows["tokens/target step"].split()[2:] == [f"{result.tokens_per_step:.2f}" for result in results]


@pytest.mark.parametrize(("speedup", "says"), [(0.8, "SLOWER here: 0.80x"), (1.6, "faster: 1.60x")])
def test_a_slower_drafter_is_called_slower(untrained, speedup, says):
    comparison = dataclasses.replace(untrained, speedup=speedup)
    assert says in comparison.verdict()
    assert says in text_of(comparison)


def test_the_warm_up_is_shown(target, capsys):
    settings = Settings(max_new_tokens=6)
    show = show_text(TOKENIZER)
    assert isinstance(show("chat", "plain"), TextStreamer)
    comparison = compare(
        target, TOKENIZER, tiny_drafter(target, tokenizer=TOKENIZER), {"chat": "Hi"}, settings, rounds=1, show=show
    )
    printed = capsys.readouterr().out
    assert printed.index("chat, plain") < printed.index("chat, FlashMap")
    assert printed.count(comparison.prompts[0].text) == 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ({}, {}, "0 prompts"),
        (PROMPTS, {"rounds": 0}, "rounds=0"),
        (PROMPTS, {"prompt_lookup_tokens": -1}, "prompt_lookup_tokens=-1"),
        ({"good": "Hi", "empty": " "}, {}, "the prompt is empty"),
        ({"good": "Hi", "long": "x" * 600}, {}, "the target holds 512 in all"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(target, monkeypatch, prompts, options, message):
    monkeypatch.setattr(compare_module, "run", None)
    drafter = tiny_drafter(target, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=message):
        compare(target, TOKENIZER, drafter, prompts, SETTINGS, **options)


def test_a_drafter_for_another_target_is_refused_first(target, monkeypatch):
    monkeypatch.setattr(compare_module, "run", None)
    with pytest.raises(ValueError, match="was made for another target"):
        compare(target, TOKENIZER, tiny_drafter(tiny_target("llama")), PROMPTS, SETTINGS)


def test_names_are_hub_ids_or_the_last_part_of_a_path(tmp_path):
    model = tiny_target("llama")
    assert compare_module.public_name(model) == "LlamaForCausalLM"
    model.name_or_path = str(tmp_path)
    assert compare_module.public_name(model) == tmp_path.name
    model.name_or_path = "owner/name"
    assert compare_module.public_name(model) == "owner/name"


def test_long_numbers_do_not_break_the_labels(untrained):
    """A fast target on a fast machine: its rates are wider than the columns."""
    fast = Spread(median=123456.7, lowest=98765.4, highest=234567.8)
    one = dataclasses.replace(untrained.prompts[0], plain_tokens_per_second=fast, flashmap_tokens_per_second=fast)
    three = [dataclasses.replace(one, name=name) for name in ("chat", "code", "maths")]
    lines = text_of(dataclasses.replace(untrained, prompts=three)).splitlines()
    for label in ROWS:
        assert any(line.strip().startswith(label.strip()) for line in lines), label
