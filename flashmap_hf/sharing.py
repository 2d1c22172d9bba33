"""A drafter on the Hub: the metadata by which it is found, and the upload of a saved one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from flashmap_hf.hub_errors import check_online, reported

CARD = "README.md"
TAG = "flashmap"  # what `flashmap list` looks for
TAGS = (TAG, "speculative-decoding", "drafter")
LIBRARY = "flashmap_hf"  # not transformers: its snippets on the Hub would not run
RELATION = "adapter"  # else the Hub takes it for a fine-tune of the target
TASK = "text-generation"
FIRST_CARD = """---
{}
---

# {title}

A FlashMap block drafter for `{target}`. Load it with `flashmap_hf.FlashMapDrafter.from_pretrained` and pass it to
`generate` as `assistant_model`. Nothing was measured of it: `flashmap evaluate` measures, `flashmap card` writes down.
"""


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).is_absolute()


def metadata(base_model: str, license: str, datasets: Sequence[str] = (), metrics: Sequence[str] = ()) -> ModelCardData:
    """The front matter of a drafter's card.

    Args:
        base_model: Hub id of the target.
        license: the Hub's name of the licence.
        datasets: Hub ids of the data sets that the prompts came from.
        metrics: names of what was measured.
    """
    return ModelCardData(
        base_model=base_model,
        base_model_relation=RELATION,
        datasets=list(datasets) or None,
        library_name=LIBRARY,
        license=license,
        metrics=list(metrics) or None,
        pipeline_tag=TASK,
        tags=list(TAGS),
    )


def complete(card: ModelCard, target: str, tags: Sequence[str] = ()) -> ModelCard:
    """`card` with what makes a drafter findable, where it does not say something else itself."""
    data: Any = card.data
    present = data.tags or []
    data.tags = [*present, *(tag for tag in dict.fromkeys([*TAGS, *tags]) if tag not in present)]
    data.library_name = data.library_name or LIBRARY
    data.pipeline_tag = data.pipeline_tag or TASK
    if data.base_model is None and is_hub_id(target):
        data.base_model, data.base_model_relation = target, RELATION
    return card


def upload(
    folder: Path,
    target: str,
    repo_id: str,
    *,
    token: bool | str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    tags: Sequence[str] = (),
    **commit: Any,
) -> CommitInfo:
    """Upload a saved drafter with a card: the one of the repository, else a first one.

    Args:
        folder: what `save_pretrained` wrote.
        target: the target's name, for the card.
        revision: a branch, made if it is not there.
        commit: `commit_message`, `commit_description`, `create_pr`.

    Raises:
        OSError: the Hub refuses or cannot be reached; says what to do.
    """
    check_online("to upload")
    api = HfApi(token=token)
    with reported(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        try:
            card = ModelCard.load(api.hf_hub_download(repo_id, CARD, revision=revision))
        except EntryNotFoundError:
            card = ModelCard(FIRST_CARD.format("{}", title=repo_id.split("/")[-1], target=target or "its target"))
        complete(card, target, tags).save(folder / CARD)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, **commit)
