"""List the drafters on the Hub that were made for a target, and whether each fits the one that you have."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import FlashMapConfig, FlashMapDrafter, chat_template_differs, check_target, target_outline, targets
from flashmap_hf.hub_errors import check_online, reported
from flashmap_hf.loading import explained, pinned
from flashmap_hf.options import option
from flashmap_hf.sharing import TAG

OTHER_TEMPLATE = "trained with another chat template: expect less speed"


@dataclass(frozen=True)
class Options:
    """What to look for.

    Raises:
        ValueError: a value is not possible; names it.
    """

    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id; its weights are not loaded")
    all: bool = option(False, "also drafters whose card names another target: some fine-tune of yours may fit")
    limit: int = option(20, "at most so many, the most downloaded ones")
    json: bool = option(False, "print one JSON object instead of a table")

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1.")


@dataclass(frozen=True)
class Listed:
    """One drafter; None where its files do not say."""

    id: str
    target: str | None
    block_size: int | None
    layers: int | None
    parameters: int | None
    size: int | None  # of the weights, in bytes
    downloads: int | None
    fits: bool
    note: str | None  # why it does not fit, or what to know


def main(options: Options) -> None:
    """Look, check, print: those that fit first."""
    check_online("to list drafters, or pass --drafter FOLDER to the other commands")
    target = target_outline.outline(options.target)
    tokenizer = None
    try:
        tokenizer = target_outline.tokenizer(options.target)
    except OSError as error:
        print(f"flashmap: {error}: vocabularies are not compared", file=sys.stderr)
    name = target_outline.hub_id(options.target)
    with reported("list of models"):
        found = list(find(None if options.all else name, options.limit))
        rows = sorted((examine(info, target, tokenizer) for info in found), key=lambda row: not row.fits)
    if options.json:
        print(json.dumps({"target": name or options.target, "drafters": [asdict(row) for row in rows]}))
    elif rows:
        Console().print(table(name or options.target, rows))
    else:
        print(nothing(name, options))


def find(base_model: str | None, limit: int) -> Iterator[ModelInfo]:
    """Repositories with the tag of drafters, and `base_model` on their card where one is asked for."""
    tags = [TAG, *([f"base_model:{base_model}"] if base_model else [])]
    return iter(HfApi().list_models(filter=tags, sort="downloads", limit=limit, full=True, cardData=True))


def examine(info: ModelInfo, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Listed:
    """What the files of a repository say, without its weights; a repository that cannot be read does not fit."""
    facts: dict[str, Any] = {"id": info.id, "downloads": info.downloads, "target": base_model(info)}
    empty: dict[str, Any] = dict.fromkeys(("block_size", "layers", "parameters", "size"))
    try:
        size = weights_size(info.id)
        with explained(info.id, {}):
            config = FlashMapConfig.from_pretrained(info.id, **pinned(info.id, {}))
    except (OSError, ValueError) as error:
        return Listed(**facts, **empty, fits=False, note=str(error))
    facts |= {
        "target": config.target_name or facts["target"],
        "block_size": config.block_size,
        "layers": config.num_hidden_layers,
        "parameters": parameters(config),
        "size": size,
    }
    if size is None:
        return Listed(**facts, fits=False, note="no weights there, only a configuration")
    try:
        check_target(config, target, tokenizer)
    except ValueError as error:
        return Listed(**facts, fits=False, note=str(error))
    differs = tokenizer is not None and chat_template_differs(config, tokenizer)
    return Listed(**facts, fits=True, note=OTHER_TEMPLATE if differs else None)


def base_model(info: ModelInfo) -> str | None:
    """The target that a card names."""
    named: Any = info.card_data.get("base_model") if info.card_data else None
    return named[0] if isinstance(named, list) and named else named or None


def weights_size(repo_id: str) -> int | None:
    """Bytes of the safetensors files; None without any."""
    try:
        siblings = HfApi().model_info(repo_id, files_metadata=True).siblings or []
    except RepositoryNotFoundError:  # gone since it was listed
        return None
    sizes = [file.size or 0 for file in siblings if file.rfilename.endswith(".safetensors")]
    return sum(sizes) if sizes else None


def parameters(config: FlashMapConfig) -> int:
    """Of the drafter that `config` describes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in FlashMapDrafter(config).parameters())


def table(target: str, rows: Sequence[Listed]) -> Table:
    """One row per drafter."""
    found = Table(title=f"Drafters for {target}", box=box.SIMPLE)
    found.add_column("drafter", overflow="fold")
    found.add_column("made for", overflow="fold")
    for name in ("K", "layers", "parameters", "MB", "downloads"):
        found.add_column(name, justify="right")
    found.add_column("fits")
    for row in rows:
        found.add_row(
            row.id, row.target or "-", shown(row.block_size), shown(row.layers), shown(row.parameters),
            "-" if row.size is None else f"{row.size / 1e6:,.1f}", shown(row.downloads),
            ("yes" if row.fits else "no") + (f": {row.note}" if row.note else ""),
        )  # fmt: skip
    return found


def shown(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def nothing(name: str | None, options: Options) -> str:
    """What to do where there is none."""
    train = f"train one (flashmap train --target {options.target})"
    if options.all or name is None:
        return f"No drafter is tagged {TAG!r} on the Hub: {train}."
    return f"No drafter on the Hub names {name} as its base model: {train}, or look at all of them with --all."
