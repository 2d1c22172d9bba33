"""`examples/reproduce.sh`, whole, on a tiny random target: it must learn one answer by heart (overfitting bar)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_files import write_target

from flashmap_hf import FlashMapDrafter

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "reproduce.sh"


def reproduce(target: Path, prompts: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "TARGET": str(target),
        "OUT": str(out),
        "PROMPTS": str(prompts),
        "TEST_PROMPTS": str(prompts),
        "MINUTES": "0.3",
        "DTYPE": "float32",  # answers of a bfloat16 target are not those that `evaluate` sees
        "TRAIN_ARGS": "--layers 2 --hidden-size 64 --block-size 4 --window 4 --draft-vocab 0 --runs 4 --run-length 8 "
        "--optimiser muon --muon-lr 0.05 --adam-lr 5e-3 --ema 0.9 --checkpoint-minutes 0.1 --report-to none",
        "RESPOND_ARGS": "--greedy-share 1 --max-new-tokens 41",
        "EVALUATE_ARGS": "--temperatures 0 --max-new-tokens 41",
        "CARD_ARGS": "--license mit --base-model org/tiny",
        "FLASHMAP": f"{sys.executable} -m flashmap_hf",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        ["bash", str(SCRIPT)], env=environment, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=300
    )


def test_the_whole_pipeline_reaches_full_acceptance_through_generate(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "one", "prompt": "Hi", "category": "chat"}) + "\n")
    target = write_target(tmp_path / "target")
    done = reproduce(target, prompts, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    drafter = tmp_path / "run" / "run" / "drafter"
    measured = json.loads((drafter / "evaluate.json").read_text())["temperatures"][0]["overall"]
    # 41 tokens: one from the prefill, then eight blocks of four drafted tokens and one of the target's
    assert measured["new_tokens"] == 41 and measured["target_steps"] == 9
    assert [position["joint"] for position in measured["positions"]] == [1.0] * 4
    FlashMapDrafter.from_pretrained(drafter)
    card = (drafter / "README.md").read_text()
    assert "base_model: org/tiny" in card
    first = (drafter / "model.safetensors").read_bytes()
    again = reproduce(target, prompts, tmp_path / "run")  # all stages are complete: nothing is done twice
    assert again.returncode == 0, again.stderr[-3000:]
    assert (drafter / "model.safetensors").read_bytes() == first
