"""From a name to a drafter: safetensors only, every key accounted for, one sentence that says what is wrong where."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from flashmap_hf.generation_config import FlashMapGenerationConfig

GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
HUB_KEYWORDS = ("revision", "cache_dir", "force_download", "local_files_only", "token", "subfolder")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
LFS_POINTER = b"version https://git-lfs"
NUM_KEYS_SHOWN = 5
LOG_IN = "run `hf auth login`, or pass token="


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


def pinned(name: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the commit that their revision stands for now: all files come from one state of the repository.

    It also keeps `transformers` from what it does for the main branch of a repository without safetensors: have a
    service convert the pickled weights, which it hands the user's token.

    Raises:
        HTTPError, RevisionResolutionError: the Hub refuses, or neither it nor the cache knows the revision.
    """
    if name is None or Path(name).exists() or not _is_repo_id(name):
        return options
    local = bool(options.get("local_files_only")) or is_offline_mode()
    hub = {key: options[key] for key in ("revision", "cache_dir", "token") if key in options}
    revision = HfApi().resolve_revision(str(name), local_files_only=local, **hub)
    return options | {"revision": revision.resolved}


def commit(name: Any, options: dict[str, Any]) -> str | None:
    """The commit of the repository that `options`, those of `pinned`, load; None for a folder."""
    return None if name is None or Path(name).exists() else options.get("revision")


@contextmanager
def explained(name: Any, options: dict[str, Any]) -> Iterator[None]:
    """Turn whatever loading raises into one sentence that names the drafter and the way out.

    Raises:
        OSError: a file is missing, damaged, or of another kind, or the Hub does not give it.
        ValueError: a value in the configuration, or an argument, is not possible.
    """
    try:
        yield
    except (OSError, SafetensorError, HTTPError, RevisionResolutionError) as error:
        if name is None:
            reason = _one_line(error)
        elif Path(name).is_dir():
            reason = _local_reason(folder(name, options), error)
        elif not _is_repo_id(name) or Path(name).is_file():
            reason = "there is no such folder, and it is no Hub id of the form 'owner/name'."
        else:
            reason = _hub_reason(str(name), options, error)
        raise OSError(f"{place(name, options)} cannot be loaded: {reason}") from error
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{place(name, options)} cannot be loaded: {_one_line(error)}") from error


def _is_repo_id(name: Any) -> bool:
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _local_reason(where: Path, error: Exception) -> str:
    if not (where / "config.json").is_file():
        return "there is no config.json; pass a folder that `save_pretrained` wrote, or a Hub id."
    weights = sorted(where.glob("*.safetensors"))
    if not weights:
        pickles = sorted({file.name for pattern in PICKLES for file in where.glob(pattern)})
        if pickles:
            return f"{_pickled(pickles)}; ask its author for {WEIGHTS}."
        return f"there is no {WEIGHTS}; pass a folder that `save_pretrained` wrote, or a Hub id."
    for file in weights:
        if _is_pointer(file):
            return f"{file.name} is a Git LFS pointer, not the weights; run `git lfs pull` there."
    if isinstance(error, SafetensorError):
        names = ", ".join(file.name for file in weights)
        return f"{names} is truncated or damaged ({_one_line(error)}); copy or download it again."
    return _one_line(error)


def _pickled(names: list[str]) -> str:
    return f"{', '.join(names)} is pickled, can run code, and is never opened"


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _hub_reason(name: str, options: dict[str, Any], error: BaseException) -> str:
    """Why a repository does not give a drafter; the client's error is often a cause of the one that was raised."""
    page = f"{constants.ENDPOINT}/{name}"
    weights = f"{options['subfolder']}/{WEIGHTS}" if options.get("subfolder") else WEIGHTS
    cached = try_to_load_from_cache(name, weights, options.get("cache_dir"), options.get("revision"))
    if isinstance(error, SafetensorError):
        if isinstance(cached, str) and _is_pointer(Path(cached)):
            return f"its {weights} is a Git LFS pointer, uploaded in place of the weights: ask its author at {page}."
        return f"its weights are damaged ({_one_line(error)}): download them again with force_download=True."
    offline = "HF_HUB_OFFLINE=1" if is_offline_mode() else "local_files_only=True"
    if is_offline_mode() or options.get("local_files_only"):
        absent = (LocalEntryNotFoundError, RevisionResolutionError)
        if not isinstance(cached, str) or any(isinstance(cause, absent) for cause in _causes(error)):
            return (
                f"it is not completely in the local cache and {offline} forbids a download: unset it, or download the "
                f"drafter beforehand ({_one_line(error)})"
            )
        return _one_line(error)
    for cause in _causes(error):
        if reason := _refusal(cause, page):
            return reason
    if not isinstance(cached, str | None):  # known not to exist
        return _without_weights(name, options, weights, page)
    return _one_line(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refusal(cause: BaseException, page: str) -> str | None:
    """What the Hub, or the way to it, has against it; None where `cause` is of another kind."""
    if isinstance(cause, GatedRepoError):
        return f"the repository is gated: ask for access at {page}, then {LOG_IN} of an account that has it."
    if isinstance(cause, RevisionNotFoundError):
        return f"the repository has no such revision: choose a branch, tag or commit of {page}/commits/main."
    if isinstance(cause, RepositoryNotFoundError):
        return f"the Hub has no such repository, or hides it: check the spelling; for a private one {LOG_IN}."
    if isinstance(cause, EntryNotFoundError):
        return None
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if status == 401:
            return f"the Hub does not know the token (401): {LOG_IN} of a valid one."
        if status == 403:
            return f"the Hub does not let this token read it (403): {LOG_IN} of an account that may."
        if status >= 500 or status == 429:
            return f"the Hub cannot answer now ({status}): try again later."
        return f"the Hub refused ({status}): {_one_line(cause)}"
    if isinstance(cause, HTTPError | ConnectionError):  # of the client's transport: no answer, or half of one
        return (
            f"the Hub cannot be reached, or broke off ({_one_line(cause) or type(cause).__name__}): check the "
            "connection and run it again; finished files are kept."
        )
    if isinstance(cause, OSError) and "Consistency check failed" in str(cause):
        return "a file came shorter than the Hub announced: run it again; if it stays so, its upload is damaged."
    return None


def _without_weights(name: str, options: dict[str, Any], weights: str, page: str) -> str:
    """The repository was read and has no such file: what has it?"""
    files = HfApi().list_repo_files(name, revision=options.get("revision"), token=options.get("token"))
    pickles = sorted(file for file in files if any(Path(file).match(pattern) for pattern in PICKLES))
    if pickles:
        return f"{_pickled(pickles)}; ask its author at {page} for {WEIGHTS}."
    return f"the repository has no {weights}: is it a drafter? See {page}/tree/main."


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


def generation_config(name: Any, options: dict[str, Any]) -> FlashMapGenerationConfig:
    """The drafter's own generation options, the defaults where it has none. `options`: those of `pinned`."""
    if name is None:
        return FlashMapGenerationConfig()
    if Path(name).is_dir():
        where = folder(name, options)
        if not (where / GENERATION_CONFIG).is_file():
            return FlashMapGenerationConfig()
    else:
        hub = {key: options[key] for key in HUB_KEYWORDS if key in options}
        try:
            file = hf_hub_download(str(name), GENERATION_CONFIG, **hub)
        except EntryNotFoundError as error:
            local = is_offline_mode() or options.get("local_files_only")
            if isinstance(error, LocalEntryNotFoundError) and not local:
                raise  # the connection broke: whether there is such a file is not known
            return FlashMapGenerationConfig()
        where = Path(file).parent
    config: Any = FlashMapGenerationConfig.from_pretrained(where)  # typed as its base class there
    return config
