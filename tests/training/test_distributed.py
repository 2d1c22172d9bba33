"""Two processes train as one process does with the doubled batch."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from flashmap_hf.cli import main
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.run_log import read_rows


def launched(out: Path, args: list[str], processes: int, runs: int) -> dict[int, dict[str, float]]:
    """The losses by step of a run under `accelerate launch` on the CPU (gloo), which `--multi_gpu` reaches, too."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *["--multi_gpu"] * (processes > 1),
               "--num_processes", str(processes),
               "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no", "--main_process_port", "0",
               "-m", "flashmap_hf", "train", *args, "--out", str(out), "--runs", str(runs)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in read_rows(out) if "velocity" in row]
    return {row["step"]: {name: row[name] for name in ("cross_entropy", "velocity", "kl", "blocks")} for row in rows}


def test_two_processes_train_to_the_same_loss_as_one_with_the_doubled_batch(
    target: LlamaForCausalLM, answers: list[Answer], tmp_path: Path
) -> None:
    target.save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "target")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(asdict(a)) + "\n" for a in answers))
    common = ["--target", str(tmp_path / "target")]
    made = main(
        ["features", *common, "--answers", str(tmp_path / "answers.jsonl"), "--out", str(tmp_path / "features")]
    )
    assert made == 0
    args = [*common, "--features", str(tmp_path / "features"), "--max-steps", "8", "--log-steps", "1", "--kl", "0.3",
            "--layers", "1", "--hidden-size", "32", "--block-size", "3", "--window", "4", "--draft-vocab", "30",
            "--run-length", "4", "--held-out", "2", "--report-to", "none",
            "--precision", "no"]  # fmt: skip
    one = launched(tmp_path / "one", args, processes=1, runs=4)
    two = launched(tmp_path / "two", args, processes=2, runs=2)
    assert list(one) == list(two) == list(range(1, 9))
    for step, losses in one.items():
        # the log has four decimals; sums over processes round otherwise than sums over rows
        assert two[step] == pytest.approx(losses, rel=1e-3, abs=2e-4), step
    record = json.loads((tmp_path / "two" / "drafter" / "training.json").read_text())
    assert record["processes"] == 2 and record["blocks"] == one[8]["blocks"]
