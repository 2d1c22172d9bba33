"""One finished benchmark of everything that can be compared, on tiny models; made once per session."""

import functools
import json
from pathlib import Path

import pytest
from conftest import tiny_drafter, tiny_target
from tiny_files import byte_tokenizer, write_drafter, write_target

from flashmap_hf.evaluation import baselines, bench

ROWS = [
    {"question_id": 1, "category": "multi/writing", "turns": ["Write a poem", "Shorter"]},
    {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
]


@functools.cache
def finished_in(root: Path) -> Path:
    """The folder with benchmark.json and the plots."""
    target = write_target(root / "target")
    drafter = write_drafter(root / "drafter", block_size=2)
    write_drafter(root / "deep", block_size=2, num_hidden_layers=2)
    like = tiny_drafter(
        tiny_target("llama", vocab_size=259),
        tokenizer=byte_tokenizer(),
        block_size=2,
        hidden_size=32,
        intermediate_size=64,
    )
    for kind in baselines.KINDS:
        baselines.CLASSES[kind](baselines.sized_like(kind, like.config)).save_pretrained(root / "baselines" / kind)
    like.save_pretrained(root / "baselines" / "flashmap")
    prompts = root / "few.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    bench.main(
        bench.Options(
            prompts=prompts,
            target=str(target),
            drafter=str(drafter),
            out=root / "out",
            baselines=root / "baselines",
            assistant=str(target),
            early_exit=1,
            variants=[str(root / "deep")],
            max_new_tokens=8,
            rounds=1,
            drift=True,
            dtype="float32",
        )
    )
    return root / "out"


@pytest.fixture
def finished(tmp_path_factory) -> Path:
    """Tests must not change it."""
    root = tmp_path_factory.getbasetemp() / "finished-benchmark"
    root.mkdir(exist_ok=True)
    return finished_in(root)
