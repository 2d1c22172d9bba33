"""From files to a drafter: bit-equal, safetensors only, and each kind of damage has a message of its own."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import BLOCK, PROMPT, VOCABULARY, complaints, run, scene, taught, tiny_drafter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from flashmap_hf import FlashMapConfig, FlashMapDrafter, FlashMapGenerationConfig
from flashmap_hf.loading import check_keys

ROOT = Path(__file__).resolve().parents[1]


def scrambled(drafter: FlashMapDrafter) -> FlashMapDrafter:
    """Every weight and buffer different from what initialisation gives."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter))
        if drafter.head.restricted:
            drafter.head.draft_vocab_ids.copy_(torch.randperm(len(VOCABULARY))[: drafter.head.size])
    return drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved drafter with a draft vocabulary."""
    scrambled(tiny_drafter(scene()[0], draft_vocab_size=20)).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 20},
        {"head": "low_rank", "head_rank": 8},
        {"coupling": "independent", "hidden_size": 32},
    ],
    ids=["shared", "draft vocabulary", "low rank", "independent"],
)
def test_save_and_load_is_bit_equal(overrides, dtype, tmp_path):
    drafter = scrambled(tiny_drafter(scene()[0], **overrides)).to(dtype)
    drafter.save_pretrained(tmp_path)
    with complaints() as found:
        loaded = FlashMapDrafter.from_pretrained(tmp_path)
    assert found == []
    assert loaded.dtype == dtype
    assert not loaded.training
    saved = drafter.state_dict()
    assert list(loaded.state_dict()) == list(saved)
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    buffers = dict(drafter.named_buffers())
    assert [name for name, _ in loaded.named_buffers()] == list(buffers)
    assert all(torch.equal(value, buffers[name]) for name, value in loaded.named_buffers())


def test_files_hold_the_draft_vocabulary_and_nothing_of_the_target(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    weights = load_file(folder / "model.safetensors")
    assert len(weights["head.draft_vocab_ids"].unique()) == 20
    assert not any(value.shape[0] == len(VOCABULARY) for value in weights.values() if value.ndim == 2)


def test_auto_classes_need_no_remote_code(folder):
    with complaints() as found:
        config, drafter = AutoConfig.from_pretrained(folder), AutoModel.from_pretrained(folder)
    assert found == []
    assert type(config) is FlashMapConfig
    assert type(drafter) is FlashMapDrafter
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert torch.equal(drafter.head.draft_vocab_ids, load_file(folder / "model.safetensors")["head.draft_vocab_ids"])


def test_loaded_drafter_works(folder):
    target, text = scene()
    found, stats = run(target, FlashMapDrafter.from_pretrained(folder), max_new_tokens=8)
    assert found.tolist() == text[:, : PROMPT.shape[1] + 8].tolist()
    assert stats.drafted > 0


def test_loading_info_is_kept_for_the_caller(folder):
    for cls in (FlashMapDrafter, AutoModel):
        drafter, info = cls.from_pretrained(folder, output_loading_info=True)
        assert type(drafter) is FlashMapDrafter
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]


def test_arguments_of_from_pretrained_pass_through(folder):
    assert FlashMapDrafter.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert FlashMapDrafter.from_pretrained(str(folder), num_steps=2).config.num_steps == 2
    assert FlashMapDrafter.from_pretrained(folder.parent, subfolder="drafter").head.size == 20
    config = FlashMapConfig.from_pretrained(folder)
    assert FlashMapDrafter.from_pretrained(folder, config=config, use_safetensors=True).head.size == 20
    state = load_file(folder / "model.safetensors")
    assert FlashMapDrafter.from_pretrained(None, config=config, state_dict=state).head.size == 20


def test_shards(folder):
    drafter = FlashMapDrafter.from_pretrained(folder)
    shutil.rmtree(folder)
    drafter.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = FlashMapDrafter.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), loaded.parameters(), strict=True))


# --- generation options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FlashMapDrafter, AutoModel])
def test_generation_options_travel_with_the_drafter(cls, folder):
    drafter = FlashMapDrafter.from_pretrained(folder)
    drafter.generation_config = FlashMapGenerationConfig(verification="one_hot", num_assistant_tokens=2, num_steps=2)
    drafter.save_pretrained(folder)
    loaded = cls.from_pretrained(folder).generation_config
    assert type(loaded) is FlashMapGenerationConfig
    assert (loaded.verification, loaded.num_assistant_tokens, loaded.num_steps) == ("one_hot", 2, 2)


def test_generation_options_are_defaults_without_the_file(folder):
    (folder / "generation_config.json").unlink()
    loaded = FlashMapDrafter.from_pretrained(folder).generation_config
    assert loaded.to_dict() == FlashMapGenerationConfig().to_dict()


def test_generation_options_given_at_load_win(folder):
    given = FlashMapGenerationConfig(num_assistant_tokens=1)
    assert FlashMapDrafter.from_pretrained(folder, generation_config=given).generation_config is given


def test_saved_generation_options_count_in_a_call(tmp_path):
    target, text = scene()
    oracle = taught(target, text)
    oracle.generation_config.num_assistant_tokens = 2
    oracle.save_pretrained(tmp_path)
    loaded = type(oracle).from_pretrained(tmp_path)
    loaded.teach(target, text)
    _, stats = run(target, loaded, max_new_tokens=12)
    assert len(stats.drafted_by_position) == 2 < BLOCK


# --- keys -----------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


KEYS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "missing buffer": (
        lambda w: {k: v for k, v in w.items() if k != "head.draft_vocab_ids"},
        "missing head.draft_vocab_ids",
    ),
    "missing weight": (lambda w: {k: v for k, v in w.items() if k != "norm.weight"}, "missing norm.weight"),
    "unexpected": (lambda w: {**w, "head.bias": torch.zeros(3)}, "unexpected head.bias"),
    "renamed": (
        lambda w: {k.replace("z_proj", "zproj"): v for k, v in w.items()},
        "missing z_proj.weight; unexpected zproj.weight",
    ),
    "another shape": (lambda w: {**w, "slot_embedding": w["slot_embedding"][:-1].clone()}, "mismatched slot_embedding"),
    "other names altogether": (lambda w: {f"model.{k}.x": v for k, v in w.items()}, "and more"),
}


@pytest.mark.parametrize("cls", [FlashMapDrafter, AutoModel])
@pytest.mark.parametrize("case", KEYS)
def test_every_key_has_its_place(case, cls, folder):
    change, message = KEYS[case]
    rewrite(folder, change)
    with pytest.raises(OSError, match="cannot be loaded") as caught:
        cls.from_pretrained(folder)
    said = str(caught.value)
    assert message in said
    assert str(folder) in said
    assert len(said) < 600
    with pytest.raises(OSError, match="cannot be loaded"):
        cls.from_pretrained(folder, output_loading_info=True)


def test_the_caller_may_allow_other_shapes(folder):
    rewrite(folder, KEYS["another shape"][0])
    drafter, info = FlashMapDrafter.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert len(info["mismatched_keys"]) == 1
    assert drafter.slot_embedding.shape[0] == BLOCK + 1


def test_a_state_dict_is_held_to_the_same(folder):
    config = FlashMapConfig.from_pretrained(folder)
    with pytest.raises(OSError, match=r"state_dict.*missing"):
        FlashMapDrafter.from_pretrained(None, config=config, state_dict={})


def test_check_keys_is_silent_when_all_is_well():
    check_keys({"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}, {})


# --- damage ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, file: str):
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (self.file,))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 31\n".format("0" * 64)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(str(folder / "exploded"))))


def of_another_kind(folder: Path) -> None:
    shutil.rmtree(folder)
    scene()[0].save_pretrained(folder)


def with_field(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {name: value}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], list[str]]] = {
    "truncated": (truncated, OSError, ["model.safetensors is truncated or damaged", "again"]),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), OSError, ["truncated or damaged"]),
    "Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text(POINTER),
        OSError,
        ["model.safetensors is a Git LFS pointer", "git lfs pull"],
    ),
    "only a pickle": (only_pickled, OSError, ["pytorch_model.bin", "never opened", "model.safetensors"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), OSError, ["there is no model.safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), OSError, ["there is no config.json", "save_pretrained"]),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], OSError, ["there is no config.json"]),
    "broken config": (lambda f: (f / "config.json").write_text("{"), OSError, ["config.json", "not a valid JSON"]),
    "another kind": (of_another_kind, OSError, ["'llama'", "not a FlashMap drafter"]),
    "field of another type": (with_field("block_size", "five"), ValueError, ["block_size"]),
    "field out of range": (with_field("num_steps", 7), ValueError, ["num_steps=7"]),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        OSError,
        ["generation_config.json", "not a valid JSON"],
    ),
    "bad generation option": (
        lambda f: (f / "generation_config.json").write_text('{"verification": "hope"}'),
        ValueError,
        ["verification='hope'"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_has_its_message(damage, folder):
    change, kind, words = DAMAGES[damage]
    change(folder)
    with pytest.raises(kind, match="cannot be loaded") as caught:
        FlashMapDrafter.from_pretrained(folder)
    said = str(caught.value)
    assert "\n" not in said
    for word in (str(folder), *words):
        assert word in said


def test_messages_differ(folder):
    """No two kinds of damage are told in the same words."""
    said = []
    for change, _, _ in DAMAGES.values():
        shutil.rmtree(folder)
        tiny_drafter(scene()[0]).save_pretrained(folder)
        change(folder)
        with pytest.raises((OSError, ValueError)) as caught:
            FlashMapDrafter.from_pretrained(folder)
        said.append(str(caught.value))
    assert len(set(said)) >= len(said) - 2  # an empty file is a truncated one, an empty folder has no config


@pytest.mark.parametrize("cls", [FlashMapDrafter, AutoModel])
def test_a_pickle_is_never_opened(cls, folder):
    only_pickled(folder)
    with pytest.raises(OSError, match="never opened"):
        cls.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_safetensors=False"):
        cls.from_pretrained(folder, use_safetensors=False)
    assert not (folder / "exploded").exists()
    # the bomb is live: opened, it would have gone off
    with (folder / "model.pt").open("rb") as file:
        pickle.load(file)  # noqa: S301
    assert (folder / "exploded").exists()


def test_a_pickle_beside_safetensors_is_ignored(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(str(folder / "exploded"))))
    FlashMapDrafter.from_pretrained(folder)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("name", ["/nowhere/at all", "./nowhere/either", "a/b/c"])
def test_no_such_folder(name):
    with pytest.raises(OSError, match=r"cannot be loaded: there is no such folder") as caught:
        FlashMapDrafter.from_pretrained(name)
    assert name in str(caught.value)


# --- the Hub, out of reach ------------------------------------------------------------------------------------------

OFFLINE = """
import socket, sys

def refuse(*args, **kwargs):
    raise SystemExit("a network call")

socket.socket.connect = socket.getaddrinfo = refuse
from flashmap_hf import FlashMapDrafter
try:
    drafter = FlashMapDrafter.from_pretrained("acme/drafter", **{options})
    print("loaded", drafter.head.size, drafter.generation_config.num_assistant_tokens)
except OSError as error:
    print(error)
"""


def offline(home: Path, **options: object) -> str:
    """What a fresh interpreter says that loads acme/drafter with HF_HUB_OFFLINE=1."""
    finished = subprocess.run(
        [sys.executable, "-c", OFFLINE.replace("{options}", repr(options))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_offline_and_not_cached(tmp_path):
    said = offline(tmp_path, revision="v7")
    for word in ("acme/drafter", "v7", "HF_HUB_OFFLINE"):
        assert word in said
    assert "\n" not in said


def test_offline_and_cached(folder, tmp_path):
    """The layout of the Hub's cache, as a download leaves it."""
    drafter = FlashMapDrafter.from_pretrained(folder)
    drafter.generation_config.num_assistant_tokens = 3
    commit = "a" * 40
    cached = tmp_path / "home" / "hub" / "models--acme--drafter"
    drafter.save_pretrained(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert offline(tmp_path / "home") == "loaded 20 3"


def test_local_files_only_is_named_too():
    with pytest.raises(OSError, match=r"'acme/drafter' \(revision v7\).*(HF_HUB_OFFLINE|local_files_only)"):
        FlashMapDrafter.from_pretrained("acme/drafter", revision="v7", local_files_only=True)
