"""Upload a drafter's folder to the Hub: first all checks that need no network, then the listed files and no others."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, get_token

from flashmap_hf import FlashMapConfig, FlashMapDrafter, __version__, hub_card
from flashmap_hf.hub_errors import check_online, reported
from flashmap_hf.loading import PICKLES
from flashmap_hf.options import option
from flashmap_hf.sharing import is_hub_id

# What a Hub repository of a drafter holds. Nothing else is uploaded.
FILES = (
    hub_card.CARD,
    "LICENSE",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    *hub_card.RECORDS,
    "evaluate.png",
    "evaluate.svg",
    "benchmark_*.png",
    "benchmark_*.svg",
    "custom_generate/generate.py",
)
REQUIRED = {  # file -> how to come by it
    "config.json": "pass a folder that `flashmap train` or `save_pretrained` wrote",
    "training.json": "take it from the folder that `flashmap train` wrote",
    "evaluate.json": "run `flashmap evaluate --drafter {folder} --prompts FILE`",
    hub_card.CARD: "run `flashmap card --folder {folder} --license NAME`",
}
BIG = 10 * 2**20  # bytes of a file that is not in the list: it hardly lies there on purpose
SKIPPED = (".git", ".cache")  # folders that others keep beside the files


@dataclass(frozen=True)
class Options:
    """What goes where.

    Raises:
        ValueError: a value is not possible; names it.
    """

    folder: Path = option(help="the drafter's folder, with its card and measurements")
    repo_id: str = option(help="owner/name on the Hub; made if it is not there")
    private: bool = option(False, "make it a private repository")
    branch: str | None = option(None, "upload to this branch, made if it is not there (default: main)")
    create_pr: bool = option(False, "open a pull request instead of committing")
    message: str = option(f"FlashMap drafter, flashmap-hf {__version__}", "of the commit")

    def __post_init__(self) -> None:
        if not is_hub_id(self.repo_id):
            raise ValueError(f"repo_id={self.repo_id!r} is no Hub id of the form owner/name.")
        if self.create_pr and self.branch is not None:
            raise ValueError("--create-pr opens a pull request against main: leave out --branch.")
        if not self.message.strip():
            raise ValueError("message is empty: say what the commit brings.")


def main(options: Options) -> None:
    """Check, then upload."""
    names = check_folder(options.folder)
    check_online("to upload")
    if get_token() is None:
        raise OSError("there is no Hub token here: run `hf auth login`, or set HF_TOKEN to one that may write")
    api = HfApi()
    with reported(options.repo_id):
        api.create_repo(options.repo_id, private=options.private or None, exist_ok=True)
        if options.private and not api.repo_info(options.repo_id).private:
            raise ValueError(
                f"{options.repo_id} is there already and public: make it private on the Hub, or leave out --private"
            )
        if options.branch is not None:
            api.create_branch(options.repo_id, branch=options.branch, exist_ok=True)
        commit = api.upload_folder(
            repo_id=options.repo_id,
            folder_path=options.folder,
            revision=options.branch,
            create_pr=options.create_pr,
            commit_message=options.message,
            allow_patterns=names,
        )
    print(f"{len(names)} files: {', '.join(names)}")
    print(commit.pr_url or commit.commit_url)


def check_folder(folder: Path) -> list[str]:
    """The names of the files to upload.

    Raises:
        OSError: the drafter in `folder` cannot be loaded.
        ValueError: something is missing, out of date or does not belong there; names it and the way out.
    """
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} is no folder: pass the one that holds the drafter.")
    there = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in SKIPPED
    }
    pickled = [name for name, path in there.items() if any(fnmatch(path.name, pattern) for pattern in PICKLES)]
    if pickled:
        raise ValueError(f"{folder} holds {', '.join(pickled)}: pickled files run code, move them out of the folder.")
    for name, way_out in REQUIRED.items():
        if name not in there:
            raise ValueError(f"{folder} has no {name}: {way_out.format(folder=folder)}.")
    FlashMapDrafter.from_pretrained(folder)
    target = FlashMapConfig.from_pretrained(folder).target_name
    if Path(target).is_absolute():
        raise ValueError(f"{folder / 'config.json'}: target_name {target!r} is a path of this machine: put its Hub id.")
    hub_card.check(folder)
    names = [name for name in there if any(fnmatch(name, pattern) for pattern in FILES)]
    others = [name for name in there if name not in names]
    big = [name for name in others if there[name].stat().st_size > BIG]
    if big:
        raise ValueError(f"{folder} holds {', '.join(big)}, no part of a drafter's repository: move it elsewhere.")
    if others:
        print(f"left out: {', '.join(others)}")
    return names
