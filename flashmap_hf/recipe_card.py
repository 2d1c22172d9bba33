"""The card of a recipe: a drafter's configuration without weights, and what training it would take."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from flashmap_hf import FlashMapConfig
from flashmap_hf.markdown import percent, table
from flashmap_hf.sharing import metadata
from flashmap_hf.training.dry_run_report import RECORD, rows

TAGS = ["flashmap-recipe", "speculative-decoding"]  # not the tag of drafters: `flashmap list` shows what can be used


def is_recipe(folder: Path) -> bool:
    """Whether `folder` holds the record of a dry run and no weights."""
    return (folder / RECORD).is_file() and not any(folder.glob("*.safetensors"))


def render(
    folder: Path, config: FlashMapConfig, record: dict[str, Any], license: str, base_model: str, notes: str
) -> str:
    """The text of the card; the same files give the same bytes."""
    data = metadata(base_model, license)
    data.tags = TAGS
    taps = [str(layer) for layer in config.tap_layers or []]
    card = ModelCard.from_template(
        data,
        template_str=(files("flashmap_hf") / "recipe_template.md").read_text(encoding="utf-8"),
        title=base_model.split("/")[-1],
        base_model=base_model,
        folder=folder.resolve().name,
        config=config,
        taps=", ".join(taps),
        taps_option=" ".join(taps),
        record=record | {"tokens_text": f"{record['tokens']:,}"},
        utilisation=percent(record["gpu"]["utilisation"]),
        table=table(["", ""], rows(record)),
        notes=notes,
    )
    return f"{str(card).rstrip()}\n"
