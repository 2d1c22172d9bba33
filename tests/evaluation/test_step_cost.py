"""The cost table of a tiny target."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flashmap_hf.evaluation.step_cost import main


def test_every_count_is_measured_in_plain_steps(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(30)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    out = tmp_path / "cost.json"
    main(
        [
            "--target",
            str(tmp_path / "target"),
            "--dtypes",
            "float32",
            "--tokens",
            "1",
            "3",
            "--rounds",
            "3",
            "--out",
            str(out),
        ]
    )
    record = json.loads(out.read_text())
    (result,) = record["results"]
    assert [r["tokens"] for r in result["rows"]] == [1, 3]
    plain = result["rows"][0]["ms"]
    for row in result["rows"]:
        assert row["ms_quartiles"][0] <= row["ms"] <= row["ms_quartiles"][1]
        assert row["plain_steps"] == row["ms"] / plain
        assert row["engine_plain_steps"] == row["engine_ms"] / plain
    assert record["provenance"]["versions"]["torch"] == torch.__version__
