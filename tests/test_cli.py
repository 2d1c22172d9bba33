"""`flashmap`: in this process, on a tiny target and drafter in folders."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_files import byte_tokenizer, write_drafter, write_target
from transformers import AutoModelForCausalLM

from flashmap_hf import drafters, targets
from flashmap_hf.cli import COMMANDS, main
from flashmap_hf.prompts import encode


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`--target` and `--drafter` options that fit each other."""
    root = tmp_path_factory.mktemp("cli")
    return ["--target", str(write_target(root / "target")), "--drafter", str(write_drafter(root / "drafter"))]


@pytest.fixture(scope="module")
def expected(folders):
    """What plain greedy decoding makes of "Hi", 12 tokens."""
    target = AutoModelForCausalLM.from_pretrained(folders[1])
    inputs = encode(target, byte_tokenizer(), "Hi")
    tokens = target.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    return tokens.tolist()


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded before the arguments were checked")

    monkeypatch.setattr(targets, "load", load)
    monkeypatch.setattr(drafters, "load", load)


def answer_of(capsys, *arguments: str) -> dict:
    """The one JSON object on stdout."""
    assert main(["generate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_measured_once_is_no_part_of_the_answer(folders, tmp_path, capsys):
    """An adaptive drafter's first call runs forwards that measure what forwards cost."""
    drafter = shutil.copytree(folders[3], tmp_path / "drafter")
    options = json.loads((drafter / "generation_config.json").read_text())
    (drafter / "generation_config.json").write_text(json.dumps(options | {"adaptive": True}))
    answer = answer_of(capsys, "Hi", *folders[:2], "--drafter", str(drafter), "--max-new-tokens", "6")
    assert answer["tokens_per_step"] >= 1.0
    assert answer["statistics"]["calls"] == 1


def complaint(capsys, *arguments: str) -> str:
    """The last line on stderr of a call that is refused (above it, loading may have shown its progress)."""
    assert main(["generate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    line = printed.err.splitlines()[-1]
    assert line.startswith("flashmap: ")
    return line


# --- what it prints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--no-drafter"]], ids=["drafter", "plain"])
def test_text_goes_to_stdout_and_the_speed_to_stderr(capsys, folders, expected, options):
    given = folders[:2] + options if options else folders
    assert main(["generate", "Hi", *given, "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == byte_tokenizer().decode(expected, skip_special_tokens=True).rstrip("\n")
    assert "12 tokens, " in printed.err.splitlines()[-1]
    assert "tokens per target step" in printed.err.splitlines()[-1]


def test_json_is_one_object_on_stdout(capsys, folders, expected):
    answer = answer_of(capsys, "Hi", *folders, "--max-new-tokens", "12", "--dtype", "float32")
    assert answer["token_ids"] == expected
    assert answer["text"] == byte_tokenizer().decode(expected, skip_special_tokens=True)
    assert answer["prompt_tokens"] == len("user: Hi\n") + 1
    assert answer["statistics"]["committed"] == 12
    assert answer["tokens_per_step"] == 12 / answer["statistics"]["target_steps"]
    assert len(answer["statistics"]["acceptance_by_position"]) == 5
    assert {"commit", "versions", "command", "machine", "time"} <= answer["provenance"].keys()


def test_plain_decoding_has_no_drafter_statistics(capsys, folders, expected):
    answer = answer_of(capsys, "Hi", *folders[:2], "--no-drafter", "--max-new-tokens", "12")
    assert answer["token_ids"] == expected
    assert answer["statistics"] is None
    assert answer["tokens_per_step"] == 1.0


def test_a_dash_reads_the_prompt_from_stdin(capsys, folders, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert answer_of(capsys, "-", *folders, "--max-new-tokens", "12")["token_ids"] == expected


@pytest.mark.parametrize("verification", ["auto", "rejection", "one_hot", "shared_noise"])
def test_a_seed_decides_the_sample(capsys, folders, verification):
    options = [*folders, "--temperature", "1.5", "--max-new-tokens", "12", "--verification", verification]
    before = torch.get_rng_state()
    first, again, other = (answer_of(capsys, "Hi", *options, "--seed", seed) for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["settings"]["verification"] == verification
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_every_call_has_its_own_and_records_it(capsys, folders):
    options = [*folders, "--temperature", "1.5", "--max-new-tokens", "12"]
    first, other = (answer_of(capsys, "Hi", *options) for _ in range(2))
    assert first["settings"]["seed"] != other["settings"]["seed"]
    again = answer_of(capsys, "Hi", *options, "--seed", str(first["settings"]["seed"]))
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


def test_compare_prints_both_texts_and_the_table(capsys, folders):
    assert main(["generate", "Hi", *folders, "--max-new-tokens", "6", "--compare"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("plain") < printed.index("FlashMap") < printed.index("speed-up")
    assert "identical" in printed


def test_compare_as_json(capsys, folders):
    answer = answer_of(capsys, "Hi", *folders, "--max-new-tokens", "6", "--compare", "--dtype", "float32")
    (result,) = answer["prompts"]
    assert result["identical"] is True
    assert result["prompt"] == "Hi"
    assert (answer["target"], answer["drafter"]) == ("target", "drafter")
    assert answer["target_dtype"] == answer["drafter_dtype"] == "float32"


def test_another_chat_template_is_a_warning(capsys, folders, tmp_path):
    drafter = write_drafter(tmp_path, chat_template="{{ messages }}")
    assert main(["generate", "Hi", *folders[:2], "--drafter", str(drafter), "--max-new-tokens", "4", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("flashmap: the drafter was trained with another chat template") == 1
    assert json.loads(printed.out)["text"]
    assert main(["generate", "Hi", *folders, "--max-new-tokens", "4"]) == 0
    assert "chat template" not in capsys.readouterr().err


def test_the_drafter_of_an_embedded_target_is_the_default(capsys, folders, expected, monkeypatch):
    monkeypatch.setattr(drafters, "default_drafter", lambda target: {folders[1]: folders[3]}[target])
    answer = answer_of(capsys, "Hi", *folders[:2], "--max-new-tokens", "12")
    assert answer["token_ids"] == expected
    assert answer["statistics"]["blocks"] > 0


def test_the_embedded_target_answers(capsys):
    answer = answer_of(capsys, "Hi", "--no-drafter", "--max-new-tokens", "2", "--dtype", "float32")
    assert len(answer["token_ids"]) == 2
    assert answer["text"].isprintable()
    assert answer["prompt_tokens"] > 10  # its chat template brings a system turn


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--no-drafter"], "the prompt is empty"),
        ([" \n", "--no-drafter"], "the prompt is empty"),
        (
            ["Hi", "--no-drafter", "--dtype", "int8"],
            "dtype must be one of auto, float32, bfloat16, float16, not 'int8'",
        ),
        (["Hi", "--no-drafter", "--max-new-tokens", "-1"], "max_new_tokens must be at least 1, not -1"),
        (["Hi", "--no-drafter", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["Hi", "--no-drafter", "--max-new-tokens", "many"], "argument --max-new-tokens: invalid int value: 'many'"),
        (["Hi", "--no-drafter", "--temperature", "-1"], "temperature must be 0"),
        (["Hi", "--no-drafter", "--temperature", "nan"], "temperature must be 0"),
        (["Hi", "--no-drafter", "--temperature", "1e-40"], "temperature must be 0"),
        (["Hi", "--no-drafter", "--seed", "-1"], "seed must be at least 0, not -1"),
        (["Hi", "--no-drafter", "--seed", str(2**64)], "seed must be below 2**64"),
        (["caf\udce9", "--no-drafter"], "the prompt holds bytes that are not text"),
        (["Hi", "--verification", "rejection"], "set a temperature above 0"),
        (["Hi", "--verification", "tree"], "argument --verification: invalid choice: 'tree'"),
        (["Hi", "--no-drafter", "--compare"], "leave out --no-drafter"),
        (["Hi", "--no-drafter", "--drafter", "x"], "not allowed with argument --no-drafter"),
        (["Hi", "--drafter", "/nowhere/at/all"], "/nowhere/at/all"),
        (["Hi", "--target", "nope"], "no drafter is known for target 'nope'"),
        (["Hi", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "the following arguments are required: prompt"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(capsys, arguments, message):
    assert message in complaint(capsys, *arguments)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_missing_default_drafter_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "CARDS", tmp_path)
    line = complaint(capsys, "Hi")
    assert "--drafter" in line
    assert "--no-drafter" in line


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_target_is_no_drafter(capsys, folders):
    line = complaint(capsys, "Hi", "--target", folders[1], "--drafter", folders[1])
    assert "a model of type 'llama', not a FlashMap drafter" in line


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_on_stdin_that_are_no_text(capsys, monkeypatch, errors):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xffhello"), encoding="utf-8", errors=errors))
    assert "the prompt" in complaint(capsys, "-", "--no-drafter")


def test_a_drafter_is_no_target(capsys, folders):
    line = complaint(capsys, "Hi", "--target", folders[3], "--no-drafter")
    assert "FlashMapConfig" in line
    assert len(line) < 400


def test_a_truncated_target_is_named(capsys, tmp_path):
    weights = write_target(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    assert str(tmp_path) in complaint(capsys, "Hi", "--target", str(tmp_path), "--no-drafter")


def test_an_unknown_target_is_named(capsys):
    assert "unknown target 'nope'" in complaint(capsys, "Hi", "--target", "nope", "--no-drafter")


def test_a_drafter_for_another_target_is_named(capsys, folders, tmp_path):
    write_target(tmp_path, hidden_size=48)
    line = complaint(capsys, "Hi", "--target", str(tmp_path), *folders[2:])
    assert "hidden size 32" in line
    assert "hidden size 48" in line


@pytest.mark.parametrize("prompt", ["x" * 600, "x" * 450], ids=["prompt", "prompt and answer"])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("how", [[], ["--compare"]], ids=["generate", "compare"])
def test_a_prompt_that_the_target_cannot_hold(capsys, folders, prompt, as_json, how):
    options = [*folders, *how, *(["--json"] if as_json else []), "--max-new-tokens", "100"]
    line = complaint(capsys, prompt, *options)
    assert "512" in line
    assert "shorten the prompt" in line


def test_a_rule_that_the_drafter_cannot_follow(capsys, folders, tmp_path):
    drafter = write_drafter(tmp_path, coupling="independent")
    options = ["--drafter", str(drafter), "--temperature", "1", "--verification", "shared_noise"]
    assert "verification='rejection'" in complaint(capsys, "Hi", *folders[:2], *options)


# --- how it ends ----------------------------------------------------------------------------------------------------


def test_no_command_is_refused_and_help_is_given(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--target", "--drafter", "--no-drafter", "--temperature", "--max-new-tokens", "--compare", "--json"):
        assert option in shown


def test_a_reader_that_goes_away_is_no_error(capsys, folders, monkeypatch):
    """`flashmap generate ... | head`: a real pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["generate", "Hi", *folders, "--max-new-tokens", "4"]) == 141
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_ends_quietly(capsys, folders, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "load", interrupted)
    assert main(["generate", "Hi", *folders]) == 130
    assert capsys.readouterr().err == "\n"


ROOT = Path(__file__).resolve().parents[1]
WITHOUT_ACCELERATE = """
import sys
sys.modules["accelerate"] = None
from flashmap_hf.cli import main
sys.exit(main(["train", "--out", "x"]))
"""


def test_a_command_without_its_extra_names_it():
    """In an interpreter of its own: modules that are loaded twice would spoil other tests."""
    command = [sys.executable, "-c", WITHOUT_ACCELERATE]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 2
    assert "train needs accelerate: pip install 'flashmap-hf[train]'" in finished.stderr


def test_every_command_is_listed_and_explains_itself(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert name in listed
        with pytest.raises(SystemExit) as exited:
            main([name, "--help"])
        assert exited.value.code == 0
        assert f"flashmap {name}" in capsys.readouterr().out
