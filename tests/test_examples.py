"""The examples, run as scripts on a tiny target and drafter."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import tiny_target
from nbclient import NotebookClient
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny_files import byte_tokenizer, write_drafter, write_target
from transformers import AutoModelForCausalLM

import flashmap_hf

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
CUSTOM_GENERATE = ROOT / "hub_cards" / "flashmap-smollm2-135m" / "custom_generate"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("examples")
    return ["--target", str(write_target(root / "target")), "--drafter", str(write_drafter(root / "drafter"))]


@pytest.fixture
def run_example(monkeypatch):
    def run_example(name: str, *arguments: str) -> int:
        """Exit code of `python examples/NAME ARGUMENTS`, in this process."""
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as exit_:
            return int(exit_.code or 0)
        return 0

    return run_example


def test_generate_streams_and_counts(run_example, folders, capsys):
    assert run_example("generate.py", "Hi", *folders, "--max-new-tokens", "5") == 0
    text, counts = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.strip()
    assert counts.startswith("5 tokens in ")
    assert "per step" in counts


def test_demo_streams_both_sides_and_prints_the_table(run_example, folders, capsys, tmp_path):
    measured = tmp_path / "measured.json"
    options = ["--rounds", "2", "--max-new-tokens", "5", "--dtype", "float32", "--json", str(measured)]
    assert run_example("demo.py", *folders, *options) == 0
    printed = capsys.readouterr().out
    for name in ("chat", "code", "maths"):
        assert printed.index(f"{name}, plain") < printed.index(f"{name}, FlashMap") < printed.index("speed-up")
    for row in ("tokens/target step", "by prompt lookup", "accepted, %", "of a plain step", "identical"):
        assert row in printed
    written = json.loads(measured.read_text(encoding="utf-8"))
    assert [result["name"] for result in written["prompts"]] == ["chat", "code", "maths"]
    assert all(result["identical"] for result in written["prompts"])
    assert (written["rounds"], written["target_dtype"]) == (2, "float32")
    assert written["provenance"]["command"].startswith("demo.py ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "dtype must be one of"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--rounds", "0"], "rounds=0"),
        (["--max-new-tokens", "5000"], "the target holds 512 in all"),
    ],
)
def test_demo_refuses_in_one_line(run_example, folders, capsys, options, message):
    assert run_example("demo.py", *folders, *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_train_drafter_makes_a_drafter_with_a_card(run_example, tmp_path, capsys):
    target = write_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("one", "two", "three")))
    args = ["--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "run"), "--max-minutes", "0.01"]
    assert run_example("train_drafter.py", *args, "--max-tokens", "700", "--base-model", "org/tiny") == 0
    assert "Ready: FlashMapDrafter" in capsys.readouterr().out
    drafter = tmp_path / "run" / "run" / "drafter"
    assert {"README.md", "config.json", "evaluate.json", "model.safetensors", "training.json"} <= {
        path.name for path in drafter.iterdir()
    }


def test_sampling_says_the_same_with_the_same_seed(run_example, folders, capsys):
    assert run_example("sampling.py", "Hi", *folders, "--max-new-tokens", "6") == 0
    printed = capsys.readouterr().out
    for rule in ("shared_noise", "rejection", "one_hot"):
        assert f"--- {rule}: 1." in printed
    assert printed.count("the same again with the same seed") == 3
    assert "ANOTHER TEXT" not in printed


def test_streaming_prints_while_it_generates(run_example, folders, capsys):
    assert run_example("streaming.py", "Hi", *folders, "--max-new-tokens", "6") == 0
    text, counts = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text
    assert counts.split(" pieces in ")[0].isdigit()


def test_streaming_ends_when_generate_fails(run_example, folders):
    with pytest.raises(ValueError, match="max_new_tokens"):  # and does not wait for text for ever
        run_example("streaming.py", "Hi", *folders, "--max-new-tokens", "0")


ADAPTERS = {
    "lora": LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", [None, *ADAPTERS])
def test_peft_target_says_what_plain_decoding_says(run_example, folders, capsys, tmp_path, kind):
    adapter = []
    if kind is not None:
        tuned = get_peft_model(tiny_target("llama", vocab_size=len(byte_tokenizer())), ADAPTERS[kind])
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        tuned.save_pretrained(tmp_path / "adapter")
        adapter = ["--adapter", str(tmp_path / "adapter")]
    assert run_example("peft_target.py", *folders, *adapter, "--max-new-tokens", "8") == 0
    assert "identical to plain: True" in capsys.readouterr().out


def test_benchmark_compares_on_a_file_of_prompts(run_example, folders, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": word, "prompt": f"Say {word}."}) + "\n" for word in ("one", "two", "six"))
    )
    options = ["--prompts", str(prompts), "--limit", "2", "--rounds", "1", "--max-new-tokens", "4"]
    measured = tmp_path / "measured.json"
    assert run_example("benchmark.py", *folders, *options, "--dtype", "float32", "--json", str(measured)) == 0
    assert "x plain decoding's speed" in capsys.readouterr().out
    written = json.loads(measured.read_text(encoding="utf-8"))
    assert [result["name"] for result in written["prompts"]] == ["one", "two"]


def check_gpu_check(written, printed):
    """Everything that a reader of the record or of the table looks for."""
    assert "float32: all equal to plain" in printed
    for column in ("first difference", "tokens/s", "speed-up", "cache bytes per token"):
        assert column in printed
    assert {"chain", "tree", "automatic", "batch"} <= written["float32"].keys() == written["fast_type"].keys()
    assert all(places == [None, None] for places in written["float32"].values())
    assert written["speed"].keys() == {"plain", *written["float32"]} - {"batch"}
    assert written["speed"]["plain"]["speedup"]["median"] == 1.0
    assert written["speed"]["chain"]["drafter_ms"] > 0.0
    memory = written["memory"]
    assert memory["cache_tokens_drafted"] == memory["cache_tokens_plain"]
    assert memory["cache_bytes_drafted_per_token"] == memory["cache_bytes_per_token"] == 3 * 2 * 2 * 8 * 4
    assert memory["state_bytes_per_request"] == memory["state_bytes_per_request_at_4096"]
    assert written["provenance"]["command"].startswith("gpu_check.py ")


def test_gpu_check_runs_on_a_cpu(run_example, folders, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    record = tmp_path / "gpu_check.json"
    options = ["--device", "cpu", "--quick", "--dtype", "float32", "--no-compile", "--json", str(record)]
    assert run_example("gpu_check.py", *folders, *options) == 0
    check_gpu_check(json.loads(record.read_text(encoding="utf-8")), capsys.readouterr().out)


@pytest.mark.slow
def test_gpu_check_compiles_and_compares_two_types(run_example, folders, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    record = tmp_path / "gpu_check.json"
    options = ["--device", "cpu", "--quick", "--dtype", "bfloat16", "--json", str(record)]
    assert run_example("gpu_check.py", *folders, *options) == 0
    written = json.loads(record.read_text(encoding="utf-8"))
    assert "chain, compiled: default" in written["speed"]
    assert written["dtype"] == "bfloat16"
    assert written["memory"]["cache_bytes_per_token"] == 3 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--max-new-tokens", "5000"], "the target holds 512 in all"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "nowhere"], "nowhere"),
    ],
)
def test_gpu_check_refuses_in_one_line(run_example, folders, capsys, options, message):
    assert run_example("gpu_check.py", *folders, "--no-compile", *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# --- the Hub repository's own generate ------------------------------------------------------------------------------


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A drafter's repository as on the Hub; its code is copied into a folder of this test alone."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = write_drafter(tmp_path / "drafter")
    shutil.copytree(CUSTOM_GENERATE, folder / "custom_generate")
    return folder


def test_custom_generate_from_hub_streams(run_example, folders, hub_folder, capsys):
    assert run_example("generate.py", "Hi", *folders, "--max-new-tokens", "8") == 0
    with_assistant = capsys.readouterr().out.rsplit("\n", 2)[0]
    options = ["--drafter", str(hub_folder), "--max-new-tokens", "8"]
    assert run_example("custom_generate_from_hub.py", "Hi", *folders[:2], *options) == 0
    assert capsys.readouterr().out.strip() == with_assistant.strip() != ""


def test_the_repositorys_generate_uses_its_own_drafter_or_the_given_one(folders, hub_folder):
    target = AutoModelForCausalLM.from_pretrained(folders[1]).eval()
    prompt = torch.tensor([[5, 17, 33]])
    call = {"do_sample": False, "max_new_tokens": 9}
    plain = target.generate(prompt, **call)
    through = {"custom_generate": str(hub_folder), "trust_remote_code": True, "local_files_only": True}
    for assistant in (None, flashmap_hf.FlashMapDrafter.from_pretrained(folders[3])):
        with flashmap_hf.record() as stats:
            found = target.generate(prompt, **call, **through, assistant_model=assistant)
        assert found.tolist() == plain.tolist()
        assert stats.calls == 1
        assert stats.drafted > 0


def test_the_repositorys_generate_says_which_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashmap_hf", None)  # as if it were not installed
    with pytest.raises(ImportError, match="needs the package flashmap_hf: install it"):
        runpy.run_path(str(CUSTOM_GENERATE / "generate.py"))


# --- the notebook ---------------------------------------------------------------------------------------------------


def quickstart(folders):
    """The notebook for the tiny models, and its code cells."""
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (parameters,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = f"TARGET, DRAFTER, NEW_TOKENS = {folders[1]!r}, {folders[3]!r}, 6"
    return notebook, cells


def check_quickstart(printed):
    for line in ("identical to plain: True", "the same again: True", "x plain decoding's speed"):
        assert line in printed


def test_the_cells_of_the_quickstart_run_in_order(folders, capsys):
    _, cells = quickstart(folders)
    assert not any(cell.outputs or cell.execution_count for cell in cells)  # it is kept without outputs
    names = {}
    for cell in cells:
        exec(compile(cell.source, cell.id, "exec"), names)
    check_quickstart(capsys.readouterr().out)


@pytest.mark.slow
def test_the_quickstart_runs_in_a_kernel_of_its_own(folders):
    notebook, cells = quickstart(folders)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    check_quickstart("".join(output.get("text", "") for cell in cells for output in cell.outputs))


# --- their size -----------------------------------------------------------------------------------------------------

LONGER = {"demo.py": 120, "gpu_check.py": 300}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_stay_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < LONGER.get(name, 60)


def test_batch_and_tree_equals_plain_row_by_row(run_example, folders, capsys):
    assert run_example("batch_and_tree.py", "Hi", "Say three words.", *folders, "--max-new-tokens", "6") == 0
    printed = capsys.readouterr().out
    assert "greedy rows identical to plain: True" in printed
    assert "--- sampled: 1." in printed
