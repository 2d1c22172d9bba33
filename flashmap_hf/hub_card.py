"""Write the card (README.md) of a drafter's folder from its config.json and the JSON files of measurements beside it.

Every number on it comes from one of those files. What stands between the two `notes` markers, the licence and the base
model are kept from the card that is there.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.repocard import yaml  # the parser that it reads front matter with

from flashmap_hf import FlashMapConfig, card_sections, recipe_card, targets
from flashmap_hf.loading import explained
from flashmap_hf.options import option
from flashmap_hf.sharing import CARD, is_hub_id, metadata

# What a card is made of; each is left out where it is missing.
RECORDS = ("training.json", "evaluate.json", "benchmark.json", "demo.json", "step_cost.json")
NOTES = re.compile(r"<!-- notes -->.*?<!-- end notes -->", re.DOTALL)
NO_NOTES = "<!-- notes -->\n<!-- end notes -->"
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")  # as the Hub spells them: apache-2.0, mit, llama3.1, other


@dataclass(frozen=True)
class Options:
    """Whose card, and what its front matter says.

    Raises:
        ValueError: a value is not one that the Hub takes; names it.
    """

    folder: Path = option(help="the drafter's folder: config.json and the JSON files")
    license: str | None = option(None, "Hub name of the licence, as apache-2.0 (default: that of the present card)")
    base_model: str | None = option(None, "Hub id of the target (default: of the present card, else of config.json)")
    datasets: list[str] = option(
        factory=list, help="Hub ids of the data sets that its prompts came from (default: of the present card)"
    )
    check: bool = option(False, "write nothing; fail where the card is not what would be written")

    def __post_init__(self) -> None:
        if self.license is not None and not LICENCE.fullmatch(self.license):
            raise ValueError(f"license={self.license!r}: use the Hub's name of it, in lower case, such as apache-2.0.")
        if self.base_model is not None and not is_hub_id(self.base_model):
            raise ValueError(f"base_model={self.base_model!r} is no Hub id of the form owner/name.")
        for name in self.datasets:
            if not is_hub_id(name):
                raise ValueError(f"datasets: {name!r} is no Hub id of the form owner/name.")


def main(options: Options) -> None:
    """Write the card, or compare."""
    path = options.folder / CARD
    if options.check:
        check(options.folder, options.license, options.base_model, options.datasets)
        print(f"{path} is up to date")
        return
    text = render(options.folder, options.license, options.base_model, options.datasets)
    aside = path.with_name(f"{CARD}.tmp")
    aside.write_text(text, encoding="utf-8", newline="\n")
    aside.replace(path)
    used = [name for name in RECORDS if (options.folder / name).is_file()]
    print(f"{path}: {', '.join(['config.json', *used])}")


def check(
    folder: Path, license: str | None = None, base_model: str | None = None, datasets: Sequence[str] = ()
) -> None:
    """Raise ValueError unless the card is what would be written; and whatever `render` raises."""
    text = render(folder, license, base_model, datasets)
    path = folder / CARD
    if not path.is_file() or path.read_bytes() != text.encode():
        problem = "is not what its JSON files give" if path.is_file() else "is missing"
        raise ValueError(f"{path} {problem}: write it with `flashmap card --folder {folder}`.")


def render(
    folder: Path, license: str | None = None, base_model: str | None = None, datasets: Sequence[str] = ()
) -> str:
    """The text of the card; the same files give the same bytes.

    Raises:
        OSError: there is no drafter's config.json in `folder`.
        ValueError: a JSON file is damaged, lacks a number, or measured other weights; the licence or the base model
            is not known. Names the file or the option.
    """
    with explained(folder, {}):
        config = FlashMapConfig.from_pretrained(folder)
    present = present_card(folder / CARD)
    license = license or present.data.get("license")
    if license is None:
        raise ValueError(f"{folder} has no card with a licence yet: name it with --license, such as apache-2.0.")
    base_model = base_model or present.data.get("base_model") or config.target_name
    if not (isinstance(base_model, str) and is_hub_id(base_model)):
        raise ValueError(f"{folder / 'config.json'}: target {base_model!r} is no Hub id: name it with --base-model.")
    notes = NOTES.search(present.text)
    if recipe_card.is_recipe(folder):
        record = read_record(folder / recipe_card.RECORD)
        return recipe_card.render(folder, config, record, license, base_model, notes[0] if notes else NO_NOTES)
    datasets = datasets or present.data.get("datasets") or ()
    records = {name: read_record(folder / name) for name in RECORDS if (folder / name).is_file()}
    check_weights(folder, records)
    sections: dict[str, Any] = {}
    for name, record in records.items():
        kind = Path(name).stem
        try:
            sections[kind] = getattr(card_sections, kind)(record)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{folder / name} lacks {error}, which the card shows: measure again.") from error
    if "evaluate" in sections:
        sections["evaluate"]["picture"] = (folder / "evaluate.png").is_file()
    card = ModelCard.from_template(
        metadata(base_model, license, datasets, card_sections.metrics(records)),
        template_str=(files("flashmap_hf") / "card_template.md").read_text(encoding="utf-8"),
        title=base_model.split("/")[-1],
        folder=folder.resolve().name,
        block_size=config.block_size,
        chat=config.chat_template_hash is not None,
        embedded=next((name for name, t in targets.EMBEDDED.items() if t.hub_id == base_model), None),
        notes=notes[0] if notes else NO_NOTES,
        sources=card_sections.sources(records),
        **sections,
    )
    return f"{str(card).rstrip()}\n"


def present_card(path: Path) -> ModelCard:
    """The card as it is; an empty one where there is none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        return ModelCard(text if text.startswith("---") else f"---\n{{}}\n---\n{text}")
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: its front matter cannot be read ({error}): mend or delete it.") from error


def read_record(path: Path) -> dict[str, Any]:
    """A JSON file with provenance."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): measure again.") from error
    if not isinstance(record, dict) or "provenance" not in record:
        raise ValueError(f"{path} does not say where it comes from (no provenance): measure again.")
    return record


def check_weights(folder: Path, records: dict[str, dict[str, Any]]) -> None:
    """Refuse measurements of other weights than those in the folder; a folder without weights may be any."""
    weights = sorted(folder.glob("*.safetensors"))
    named = {name: record["drafter_weights"] for name, record in records.items() if "drafter_weights" in record}
    measured = {name: weight for name, weight in named.items() if weight.startswith("sha256 ")}
    if not weights or not measured:
        return
    digest = hashlib.sha256()
    for file in weights:
        digest.update(file.read_bytes())
    for name, weight in measured.items():
        if weight != f"sha256 {digest.hexdigest()}":
            command = "flashmap bench" if name == "benchmark.json" else "flashmap evaluate"
            raise ValueError(f"{folder / name} measured other weights than those in {folder}: run `{command}` again.")
