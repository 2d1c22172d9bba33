"""Targets with quantised weights (quanto, GGUF): a drafter works, and greedy output is that of the same target."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import DRAFTER_SIZES, difference, oracle_for, random_prompt, tiny_drafter, tiny_target
from optimum.quanto import freeze, qint4, qint8, quantize
from tiny_files import SPECIAL, byte_tokenizer
from transformers import AutoModelForCausalLM, GgufConfig, QuantoConfig

import flashmap_hf
from flashmap_hf import FlashMapDrafter, targets
from flashmap_hf.head import unembedding_rows

VOCABULARY = len(byte_tokenizer())
PROMPT = random_prompt(7, VOCABULARY, seed=3)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
# Widths are multiples of 32, the block of the GGUF types.
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("target")
    tiny_target(**SIZES).save_pretrained(where)
    return where


def write_gguf(folder: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The tiny Llama as llama.cpp stores it, matrices in blocks of `kind`."""
    model = tiny_target(**SIZES)
    config = model.config
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token, _ in tokens]
    )
    writer.add_token_scores([0.0] * len(tokens))  # no merges follow from them
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.numpy())
        else:
            writer.add_tensor(stored, gguf.quants.quantize(tensor.numpy().astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "tiny.gguf"


def quantised(kind: str, folder: Path, tmp_path: Path) -> Any:
    if kind.startswith("gguf"):
        file = write_gguf(tmp_path, gguf.GGMLQuantizationType.Q8_0)
        options = {"quantization_config": GgufConfig(dequantize=True)} if kind == "gguf, dequantised" else {}
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **options
        ).eval()
    if kind == "quanto through transformers":
        config = QuantoConfig(weights="int8")
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # the unembedding is quantised, too
    quantize(model, weights=qint4 if "int4" in kind else qint8)
    if "frozen" in kind:
        freeze(model)
    return model


KINDS = ["quanto through transformers", "quanto, frozen", "quanto, int4, frozen", "quanto", "gguf", "gguf, dequantised"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_the_quantised_target(kind: str, folder: Path, tmp_path: Path) -> None:
    target = quantised(kind, folder, tmp_path)
    plain = target.generate(**PROMPT, **GREEDY)
    oracle = oracle_for(target, block_size=4, window=4)
    oracle.teach(target, plain)
    with flashmap_hf.record() as stats:
        ours = target.generate(**PROMPT, **GREEDY, assistant_model=oracle)
    assert ours.tolist() == plain.tolist(), difference(target, plain, ours)
    assert stats.accepted > 0 and stats.plain_calls == 0
    for head in ({}, {"draft_vocab_size": 40}, {"head": "low_rank", "head_rank": 8}):
        drafter = tiny_drafter(target, **head)
        with flashmap_hf.record() as stats:
            ours = target.generate(**PROMPT, **GREEDY, assistant_model=drafter)
        assert ours.tolist() == plain.tolist(), difference(target, plain, ours)
        assert stats.drafted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_read_off_are_those_that_it_applies(kind: str, folder: Path, tmp_path: Path) -> None:
    target = quantised(kind, folder, tmp_path)
    head = target.get_output_embeddings()
    ids = torch.tensor([5, 0, VOCABULARY - 1, 17])
    rows = unembedding_rows(head, ids, 64)
    assert type(rows) is torch.Tensor and rows.shape == (4, 64) and rows.is_floating_point()
    assert torch.equal(unembedding_rows(head, VOCABULARY, 64)[ids], rows)
    if kind != "quanto":  # not frozen, it keeps the whole weights and rounds them at every call
        with torch.no_grad():
            columns = head(torch.eye(64))[:, ids]
        torch.testing.assert_close(rows, columns.t())


def test_a_drafter_of_the_original_serves_its_quantised_target(folder: Path, tmp_path: Path) -> None:
    """Same contract, other weights: what was trained for the float target is accepted by the quantised one."""
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    drafter = FlashMapDrafter.from_target(original, **DRAFTER_SIZES)
    drafter.save_pretrained(tmp_path / "drafter")
    target = quantised("quanto, frozen", folder, tmp_path)
    loaded = FlashMapDrafter.from_pretrained(tmp_path / "drafter")
    flashmap_hf.check_target(loaded.config, target)
    plain = target.generate(**PROMPT, **GREEDY)
    assert target.generate(**PROMPT, **GREEDY, assistant_model=loaded).tolist() == plain.tolist()


def test_sampling_with_shared_noise_from_a_quantised_target(folder: Path, tmp_path: Path) -> None:
    """Its law is its own: the text depends on the noise alone, whatever the drafter proposes."""
    target = quantised("quanto, frozen", folder, tmp_path)
    texts = []
    for seed in (0, 1):
        torch.manual_seed(6)
        drafter = tiny_drafter(target, seed=seed)
        texts.append(
            target.generate(**PROMPT, do_sample=True, top_k=0, max_new_tokens=20, assistant_model=drafter).tolist()
        )
    assert texts[0] == texts[1]


def test_targets_load_reads_a_gguf_folder(tmp_path: Path) -> None:
    name = write_gguf(tmp_path, gguf.GGMLQuantizationType.Q4_1).name
    target, tokenizer = targets.load(tmp_path, gguf_file=name, dtype=torch.float32)
    call: dict[str, Any] = {"tokenizer": tokenizer, **GREEDY}
    inputs = tokenizer("two words", return_tensors="pt")
    drafter = FlashMapDrafter.from_target(target, tokenizer, **DRAFTER_SIZES).eval()
    plain = target.generate(**inputs, **call)
    assert target.generate(**inputs, **call, assistant_model=drafter).tolist() == plain.tolist()
