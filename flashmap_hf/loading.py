"""From a name to a drafter: safetensors only, every key accounted for, one sentence that says what is wrong where."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from flashmap_hf.generation_config import FlashMapGenerationConfig

GENERATION_CONFIG = "generation_config.json"
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "token", "subfolder")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
LFS_POINTER = b"version https://git-lfs"
NUM_KEYS_SHOWN = 5


def place(name: Any, options: dict[str, Any]) -> str:
    """Which drafter an error is about: folder, or repository and revision."""
    if name is None:
        return "the drafter in state_dict"
    if Path(name).is_dir():
        return f"drafter in {folder(name, options)}"
    return f"drafter {str(name)!r} (revision {options.get('revision') or 'main'})"


def folder(name: Any, options: dict[str, Any]) -> Path:
    """The local folder that holds the files."""
    return Path(name) / (options.get("subfolder") or "")


@contextmanager
def explained(name: Any, options: dict[str, Any]) -> Iterator[None]:
    """Turn whatever loading raises into one sentence that names the drafter and the way out.

    Raises:
        OSError: a file is missing, damaged, or of another kind, or the Hub does not give it.
        ValueError: a value in the configuration, or an argument, is not possible.
    """
    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{place(name, options)} cannot be loaded: {_one_line(error)}") from error
    except (OSError, SafetensorError) as error:
        if name is not None and Path(name).is_dir():
            reason = _local_reason(folder(name, options), error)
        else:
            reason = _one_line(error)
            if not _is_repo_id(name):
                reason = "there is no such folder, and it is no Hub id of the form 'owner/name'."
            elif isinstance(error, SafetensorError):
                reason = f"its weights are damaged ({reason}): download them again with force_download=True"
            elif is_offline_mode() or options.get("local_files_only"):
                switch = "HF_HUB_OFFLINE=1" if is_offline_mode() else "local_files_only=True"
                reason = (
                    f"it is not completely in the local cache and {switch} forbids a download: unset it, or download "
                    f"the drafter beforehand ({reason})"
                )
        raise OSError(f"{place(name, options)} cannot be loaded: {reason}") from error


def _is_repo_id(name: Any) -> bool:
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _local_reason(where: Path, error: Exception) -> str:
    if not (where / "config.json").is_file():
        return "there is no config.json; pass a folder that `save_pretrained` wrote, or a Hub id."
    weights = sorted(where.glob("*.safetensors"))
    if not weights:
        pickles = sorted({file.name for pattern in PICKLES for file in where.glob(pattern)})
        if pickles:
            return (
                f"{', '.join(pickles)} is pickled, can run code, and is never opened; ask its author for "
                "model.safetensors."
            )
        return "there is no model.safetensors; pass a folder that `save_pretrained` wrote, or a Hub id."
    for file in weights:
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                return f"{file.name} is a Git LFS pointer, not the weights; run `git lfs pull` there."
    if isinstance(error, SafetensorError):
        names = ", ".join(file.name for file in weights)
        return f"{names} is truncated or damaged ({_one_line(error)}); copy or download it again."
    return _one_line(error)


def check_keys(info: dict[str, Any], options: dict[str, Any]) -> None:
    """Every key of the weights has its place and every place its key; transformers itself only warns.

    Raises:
        OSError: names the keys.
    """
    problems = [
        f"{kind} {', '.join(keys[:NUM_KEYS_SHOWN])}{' and more' if len(keys) > NUM_KEYS_SHOWN else ''}"
        for kind in ("missing", "unexpected", "mismatched")
        if (keys := sorted(str(k[0]) if isinstance(k, tuple) else str(k) for k in info.get(f"{kind}_keys", ())))
        and not (kind == "mismatched" and options.get("ignore_mismatched_sizes"))
    ]
    if problems:
        raise OSError(
            f"the keys of its weights are not those of its configuration ({'; '.join(problems)}); "
            "config.json and model.safetensors must come from the same `save_pretrained`."
        )


def generation_config(name: Any, commit: str | None, options: dict[str, Any]) -> FlashMapGenerationConfig:
    """The drafter's own generation options, the defaults where it has none. `commit`: what its config came from."""
    if name is None:
        return FlashMapGenerationConfig()
    if Path(name).is_dir():
        where = folder(name, options)
        if not (where / GENERATION_CONFIG).is_file():
            return FlashMapGenerationConfig()
    else:
        hub = {key: options[key] for key in HUB_KEYWORDS if key in options}
        try:
            file = hf_hub_download(name, GENERATION_CONFIG, revision=commit or options.get("revision"), **hub)
        except EntryNotFoundError:
            return FlashMapGenerationConfig()
        where = Path(file).parent
    config: Any = FlashMapGenerationConfig.from_pretrained(where)  # typed as its base class there
    return config
