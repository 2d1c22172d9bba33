"""The table of methods: every one gives the target's own text, and the right keywords reach generate."""

import json

import pytest
import torch
from conftest import oracle_for, random_prompt, tiny_drafter, tiny_target
from tiny_files import byte_tokenizer, write_drafter, write_target

from flashmap_hf import FlashMapGenerationConfig
from flashmap_hf.evaluation import baselines, methods
from flashmap_hf.evaluation.bench_prompts import Item
from flashmap_hf.evaluation.paired import measure
from flashmap_hf.prompt_files import PromptRow
from flashmap_hf.runs import Settings

ITEM = Item(0, PromptRow("p", "x"), 0)


@pytest.fixture(scope="module")
def tiny() -> tuple:
    target = tiny_target("llama", vocab_size=259)
    return target, random_prompt(6, 250, seed=1)


def test_every_method_gives_the_plain_text(tiny, tmp_path):
    target, inputs = tiny
    text = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    drafter = oracle_for(target)
    drafter.teach(target, text)
    small = write_target(tmp_path / "small", num_hidden_layers=1)
    table = [
        methods.plain(target),
        methods.prompt_lookup(target, 3),
        methods.early_exit(target, 1),
        methods.assistant(target, byte_tokenizer(), str(small)),
        *methods.flashmap(drafter, target, str(tmp_path), curve=True),
    ]
    for method in table:
        assert measure(target, method, ITEM, inputs, Settings(24), 0, 1).tokens == text[0, 6:].tolist(), method.name
    assert len({method.name for method in table}) == len(table)
    assert [m.options["num_assistant_tokens"] for m in table if m.once] == [1, 2, 3, 4, 5]
    json.dumps([method.to_dict() for method in table], allow_nan=False)


def test_each_trained_baseline_is_a_method(tiny, tmp_path):
    target, inputs = tiny
    text = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    like = tiny_drafter(target, hidden_size=32, intermediate_size=64)
    for kind in ("eagle", "dflash", "medusa"):
        config = baselines.sized_like(kind, like.config)
        baselines.CLASSES[kind](config).save_pretrained(tmp_path / kind)
    found = methods.trained_baselines(target, tmp_path)
    assert [method.name for method in found] == ["dflash", "eagle", "medusa"]
    for method in found:
        result = measure(target, method, ITEM, inputs, Settings(12), 0, 1)
        assert result.tokens == text[0, 6:].tolist()
        assert result.drafted[0] > 0
        assert method.footprint.weight_bytes > 0 and method.footprint.state_bytes(64) > 0
        assert method.details["drafter"]["weights"].startswith("sha256 ")
    assert [method.footprint.per_token for method in found] == [False, True, False]
    with pytest.raises(ValueError, match="holds none of dflash, eagle, medusa: train them with `flashmap baselines`"):
        methods.trained_baselines(target, tmp_path / "dflash")


def test_another_vocabulary_goes_through_both_tokenizers(tiny, tmp_path):
    target, _ = tiny
    write_target(tmp_path)
    same = methods.assistant(target, byte_tokenizer(), str(tmp_path))
    assert same.label == f"assisted, {tmp_path.name}" and same.footprint.per_token
    other = byte_tokenizer()
    other.add_tokens(["another"])
    keywords = {}
    generate = target.generate
    target.generate = lambda **given: keywords.update(given) or torch.zeros(1, 1)
    methods.assistant(target, other, str(tmp_path)).generate({}, None, None)
    target.generate = generate
    assert keywords["tokenizer"] is other
    assert keywords["assistant_tokenizer"].get_vocab() == byte_tokenizer().get_vocab()


def test_a_way_switches_off_what_is_not_its_own():
    """Adaptive blocks and n-grams would otherwise come with the drafter's defaults."""
    target = tiny_target("llama")
    table = {m.name: m for m in methods.flashmap(tiny_drafter(target), target, "", False)}
    assert set(table) == {*methods.WAYS, methods.STOCK_LOOP}
    off = {"num_steps": 1, "adaptive": False, "draft_ngrams": False}
    assert table["flashmap"].options == off and not table["flashmap"].tree
    assert table["flashmap_midpoint"].options == off | {"num_steps": 2}
    assert table["flashmap_tree"].options == off | {"tree_size": methods.TREE_SIZE}
    assert table["flashmap_auto"].options == {"num_steps": 1, "adaptive": True, "draft_ngrams": True}
    assert table["flashmap_tree"].tree and table["flashmap_ngrams"].tree and table["flashmap_auto"].tree
    for method in table.values():
        FlashMapGenerationConfig(**method.options)


def test_the_stock_loop_is_that_of_transformers(monkeypatch):
    """Ours is not entered, the output is plain decoding's, and the hook is as it was."""
    target = tiny_target("llama")
    prompt = torch.tensor([[5, 6, 7]])
    config = FlashMapGenerationConfig(do_sample=False, max_new_tokens=12)
    plain = target.generate(prompt, generation_config=config)
    table = {m.name: m for m in methods.flashmap(tiny_drafter(target, block_size=3), target, "", False)}
    hooked = type(target)._assisted_decoding
    monkeypatch.setattr("flashmap_hf.hook.decode", None)
    assert table[methods.STOCK_LOOP].generate({"input_ids": prompt}, config, None).tolist() == plain.tolist()
    assert type(target)._assisted_decoding is hooked
    with pytest.raises(TypeError):
        table["flashmap"].generate({"input_ids": prompt}, config, None)


def test_a_variant_is_another_drafter(tiny, tmp_path):
    target, _ = tiny
    folder = write_drafter(tmp_path / "deep", num_hidden_layers=2)
    method = methods.variant(target, byte_tokenizer(), str(folder))
    assert (method.name, method.label, method.once) == ("flashmap:deep", "FlashMap, deep", True)
    assert method.details["drafter"]["num_hidden_layers"] == 2
