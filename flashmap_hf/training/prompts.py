"""`flashmap prompts`: a JSONL file of prompts that the target writes itself, in its users' place.

Or the good ones out of a file (`--prompts`) or of a data set (`--dataset`, `--column`). Copies, loops and texts that
are too short, too long or unfinished are left out and counted. A killed run is resumed by the same command.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn

from flashmap_hf import targets
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.options import option
from flashmap_hf.progress import ProgressLog
from flashmap_hf.prompt_files import read_prompts
from flashmap_hf.training.append_rows import only_writer
from flashmap_hf.training.dataset_prompts import dataset_prompts
from flashmap_hf.training.prompt_collection import Candidate, PromptCollection
from flashmap_hf.training.user_turns import WAY_OUT, write_turns

OWN_PROMPTS = 1000  # how many a target writes unless told otherwise
PATIENCE = 200  # a target whose last so many attempts all failed will not do better
RECORD_EVERY = 100  # attempts


@dataclass(frozen=True)
class Options:
    """What `flashmap prompts` can be told."""

    out: Path = option(help="the JSONL file; a run in it is resumed; the counts go into .json beside it")
    target: str = option(targets.SMOLLM2.name, "writes the prompts: an embedded target, a folder or a Hub id")
    num_prompts: int | None = field(  # `option` knows no short names
        default=None, metadata={"help": f"default: {OWN_PROMPTS} of a target, all of a file", "aliases": ["-n"]}
    )
    prompts: Path | None = option(None, "take them from this JSONL file, without a target")
    dataset: str | None = option(None, "take them from this data set, through the library `datasets`")
    column: str | None = option(None, "of the data set: texts, or conversations, of which the first user turn counts")
    split: str = option("train", "of the data set")
    subset: str | None = option(None, "configuration of the data set")
    temperature: float = option(0.9, "of the writing: higher, more varied; lower, more sensible")
    max_new_tokens: int = option(256, "longest prompt that a target may write")
    min_length: int = option(8, "characters of a prompt")
    max_length: int = option(4000, "characters of a prompt")
    batch_size: int = option(64, "prompts written at once")
    dtype: str = option("auto", "of the target: auto, float32, bfloat16, float16")
    seed: int = option(0, "of the writing")

    def __post_init__(self) -> None:
        if self.out.suffix != ".jsonl":
            raise ValueError(f"--out {self.out}: must end with .jsonl.")
        if self.prompts is not None and self.dataset is not None:
            raise ValueError("--prompts and --dataset exclude each other: choose one.")
        if (self.dataset is None) != (self.column is None):
            raise ValueError("--dataset and --column belong together: the column holds the prompts.")
        if self.prompts is not None and self.prompts.absolute() == self.out.absolute():
            raise ValueError(f"--out {self.out} is the file that --prompts reads: choose another.")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be positive, or all prompts are the same.")
        for name in ("num_prompts", "max_new_tokens", "min_length", "max_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1.")

    @property
    def own(self) -> bool:
        """Whether the target writes the prompts."""
        return self.prompts is None and self.dataset is None

    @property
    def wanted(self) -> int | None:
        """How many; None: all that there are."""
        return OWN_PROMPTS if self.num_prompts is None and self.own else self.num_prompts

    @property
    def source(self) -> dict[str, Any]:
        """What the prompts depend on; a run is resumed only with the same."""
        if self.prompts is not None:
            return {"prompts": self.prompts.name}
        if self.dataset is not None:
            return {name: getattr(self, name) for name in ("dataset", "subset", "split", "column")}
        return {name: getattr(self, name) for name in ("target", "seed", "temperature", "max_new_tokens")}


def main(options: Options) -> None:
    """Write the prompts.

    Raises:
        ValueError: an input is malformed, the file holds other prompts, or hardly any attempt gives one.
        OSError: a file cannot be read or written; what was written stays.
    """
    with only_writer(options.out):
        collection = PromptCollection(options.out, options.source, options.min_length, options.max_length)
        missing = None if options.wanted is None else options.wanted - len(collection.ids)
        candidates = iter(()) if missing is not None and missing <= 0 else source(options, collection.attempts, missing)
        with collection:
            collect(candidates, collection, options.wanted)
    print(f"{len(collection.ids)} prompts in {options.out}; refused: {collection.refusals()}")


def source(options: Options, start: int, missing: int | None) -> Iterator[Candidate]:
    """What to choose from, opened before anything is written; a target goes on with attempt `start`."""
    if options.prompts is not None:
        return (Candidate(row.id, row.prompt, row.category) for row in read_prompts(options.prompts))
    if options.dataset is not None and options.column is not None:
        rows = dataset_prompts(options.dataset, options.column, options.split, options.subset)
        return (Candidate(row.id, row.prompt) for row in rows)
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=choose_dtype(options.dtype, device), device=device)
    turns = write_turns(
        target, tokenizer, start=start, seed=options.seed, temperature=options.temperature,
        max_new_tokens=options.max_new_tokens, batch_size=min(options.batch_size, missing or options.batch_size),
    )  # fmt: skip
    return (Candidate(f"own-{options.seed}-{turn.index}", turn.text, tokens=turn.tokens) for turn in turns)


def collect(candidates: Iterator[Candidate], collection: PromptCollection, wanted: int | None) -> None:
    """Take candidates until `wanted` prompts are there, or none is left.

    Raises:
        ValueError: no candidate is a prompt, or, if a target writes them, none of the last `PATIENCE`.
    """
    barren = 0
    with ProgressLog(*ProgressLog.get_default_columns(), MofNCompleteColumn()) as progress:
        task = progress.add_task("prompts", total=wanted, completed=len(collection.ids))
        while (wanted is None or len(collection.ids) < wanted) and (candidate := next(candidates, None)) is not None:
            barren = 0 if collection.add(candidate) else barren + 1
            progress.update(task, completed=len(collection.ids))
            if collection.attempts % RECORD_EVERY == 0:
                collection.save()
            if collection.own and barren == PATIENCE:
                collection.save()
                raise ValueError(
                    f"none of the last {PATIENCE} attempts gave a prompt (refused: {collection.refusals()}): raise "
                    f"--max-new-tokens, lower --temperature, or {WAY_OUT}."
                )
    collection.save()
    if not collection.ids:
        raise ValueError(f"no prompt is left (refused: {collection.refusals()}): lower --min-length or give others.")
