"""`flashmap respond`: the target answers prompts, some greedily and some sampled, into a folder of JSONL shards.

A drafter learns from what its own target says. Answers are decoded in batches and written as they finish; a killed run
is resumed by the same command, at the prompts that have no answer yet.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, TextColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashmap_hf import targets
from flashmap_hf.devices import choose_dtype, default_device
from flashmap_hf.fingerprints import chat_template_hash, vocabulary_hash
from flashmap_hf.options import option
from flashmap_hf.progress import ProgressLog
from flashmap_hf.prompt_files import PromptRow, read_prompts
from flashmap_hf.prompts import encode
from flashmap_hf.provenance import write_record
from flashmap_hf.training.answer_folder import MANIFEST, AnswerWriter, check_out, read_answer_folder, target_shape
from flashmap_hf.training.answers import Answer
from flashmap_hf.training.append_rows import only_writer, writing
from flashmap_hf.training.batch import Request
from flashmap_hf.training.decode import decode, end_ids

RECORD = "respond.json"
RECORD_SECONDS = 60.0
WINDOW = 8  # batches: prompts are sorted by length within so many, not over all, or a stopped run has the short ones


@dataclass(frozen=True)
class Options:
    """What `flashmap respond` can be told."""

    prompts: Path = option(help="JSONL of prompts (flashmap prompts makes one)")
    out: Path = option(help="folder of the answers; a run in it is resumed")
    target: str = option(targets.SMOLLM2.name, "an embedded target, a folder or a Hub id")
    greedy_share: float = option(2 / 3, "share of the prompts that are answered greedily")
    temperature: float = option(1.0, "of the other answers, sampled without any filter")
    max_new_tokens: int = option(256, "longest answer")
    max_prompt_length: int = option(1024, "prompts with more tokens are left out")
    batch_size: int = option(64, "answers decoded at once")
    max_tokens: int | None = option(None, "begin no answer once the folder holds so many response tokens")
    limit: int | None = option(None, "answer the first so many prompts of the file")
    shard_rows: int = option(1000, "answers of a file")
    dtype: str = option("auto", "of the target: auto, float32, bfloat16, float16")
    seed: int = option(0, "of the sampling, of the order and of who is answered greedily")

    def __post_init__(self) -> None:
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"--greedy-share {self.greedy_share}: must lie between 0 and 1.")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be positive; --greedy-share 1 answers greedily.")
        for name in ("max_new_tokens", "max_prompt_length", "batch_size", "max_tokens", "limit", "shard_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1.")


@dataclass
class Tally:
    """What a folder holds: answers and response tokens, greedy and sampled; cut off: answers without an end."""

    greedy_answers: int = 0
    greedy_tokens: int = 0
    sampled_answers: int = 0
    sampled_tokens: int = 0
    cut_off: int = 0
    ids: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return self.greedy_tokens + self.sampled_tokens

    def add(self, answer: Answer, stop_ids: Sequence[int]) -> None:
        kind = "sampled" if answer.temperature > 0 else "greedy"
        setattr(self, f"{kind}_answers", getattr(self, f"{kind}_answers") + 1)
        setattr(self, f"{kind}_tokens", getattr(self, f"{kind}_tokens") + len(answer.response_ids))
        self.cut_off += not answer.response_ids or answer.response_ids[-1] not in stop_ids
        self.ids.add(answer.id)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "ids"}


def main(options: Options) -> None:
    """Answer the prompts.

    Raises:
        ValueError: an input is malformed, the folder was begun with other options, or no prompt is short enough.
        OSError: a file cannot be read or written; what was written stays.
    """
    check_out(options.out)
    rows = read_prompts(options.prompts)[: options.limit]
    device = default_device()
    target, tokenizer = targets.load(options.target, dtype=choose_dtype(options.dtype, device), device=device)
    with only_writer(options.out / MANIFEST):
        record = respond(target, tokenizer, rows, options)
    print(
        f"{record['greedy_answers']} greedy and {record['sampled_answers']} sampled answers in {options.out}, "
        f"{record['greedy_tokens']} and {record['sampled_tokens']} response tokens; {record['cut_off']} answers cut "
        f"off at their limit, {record['skipped_long']} prompts skipped as too long"
    )
    this = record["this_run"]
    print(f"this run: {this['tokens']} tokens in {this['seconds']:.0f} s, {this['tokens_per_second']:.1f} tokens/s")


def respond(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], options: Options
) -> dict[str, Any]:
    """Answer `rows` into `options.out`; returns the record."""
    writer = AnswerWriter(options.out, manifest(target, tokenizer, options), options.shard_rows)
    seconds_before, stop_ids, tally = seconds_of(options.out / RECORD), end_ids(target), Tally()
    for answer in read_answer_folder(options.out) if writer.begun else ():
        tally.add(answer, stop_ids)
    tokens_before, start = tally.tokens, time.monotonic()
    queue = Queue(target, tokenizer, rows, options, tally)

    def save() -> dict[str, Any]:
        seconds, tokens = time.monotonic() - start, tally.tokens - tokens_before
        record = tally.to_dict() | {"prompts": len(rows), "skipped_long": queue.skipped_long}
        record |= {"seconds": seconds_before + seconds, "options": shown(options)}
        record["this_run"] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        with writing(options.out / RECORD):
            write_record(options.out / RECORD, record)
        return record

    saved = start
    columns = (*ProgressLog.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with ProgressLog(*columns) as progress:
        task = progress.add_task("answers", total=len(rows), completed=len(tally.ids), tokens=tally.tokens)
        try:
            for answer in decode(target, queue, batch_size=options.batch_size, seed=options.seed):
                writer.write(answer)
                tally.add(answer, stop_ids)
                progress.update(task, completed=len(tally.ids) + queue.skipped_long, tokens=tally.tokens)
                if time.monotonic() - saved > RECORD_SECONDS:
                    save()
                    saved = time.monotonic()
        finally:
            writer.close()
    if not tally.ids:
        raise ValueError(
            f"none of the {len(rows)} prompts in {options.prompts} is short enough: raise --max-prompt-length "
            f"{options.max_prompt_length} (the target may hold fewer)."
        )
    return save()


class Queue:
    """Requests for the prompts without an answer, in a seeded order, near ones of similar length."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[PromptRow],
        options: Options,
        tally: Tally,
    ):
        self.target, self.tokenizer, self.rows, self.options, self.tally = target, tokenizer, rows, options, tally
        self.positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.skipped_long = 0

    def __iter__(self) -> Iterator[Request]:
        rows = [row for row in self.rows if row.id not in self.tally.ids]
        random.Random(self.options.seed).shuffle(rows)
        order = iter(rows)
        while window := list(islice(order, WINDOW * self.options.batch_size)):
            for request in sorted(self.requests(window), key=lambda request: len(request.prompt_ids)):
                if self.options.max_tokens is not None and self.tally.tokens >= self.options.max_tokens:
                    return
                yield request

    def requests(self, rows: Iterable[PromptRow]) -> Iterator[Request]:
        """The prompts that are short enough; the others are counted."""
        for row in rows:
            ids = encode(self.target, self.tokenizer, row.prompt)["input_ids"][0].tolist()
            room = self.options.max_new_tokens if self.positions is None else self.positions - len(ids)
            if len(ids) > self.options.max_prompt_length or room < 1:
                self.skipped_long += 1
                continue
            greedy = share(self.options.seed, row.id) < self.options.greedy_share
            temperature = 0.0 if greedy else self.options.temperature
            yield Request(row.id, ids, temperature, min(room, self.options.max_new_tokens))


def share(seed: int, id: str) -> float:
    """A number in [0, 1) for each prompt, the same in every run."""
    digest = hashlib.sha256(f"share:{seed}:{id}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def manifest(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Options) -> dict[str, Any]:
    """What the answers depend on."""
    whose = {
        "target": target.config.name_or_path,
        "target_shape": target_shape(target),
        "vocabulary_hash": vocabulary_hash(tokenizer),
        "chat_template_hash": chat_template_hash(tokenizer),
    }
    return whose | {n: getattr(options, n) for n in ("seed", "temperature", "greedy_share", "max_new_tokens")}


def shown(options: Options) -> dict[str, Any]:
    """The options for the record; paths are cut to their last part: they are the machine's own."""
    return {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}


def seconds_of(path: Path) -> float:
    """What the runs before this one took, 0 where there was none.

    Raises:
        ValueError: the record is damaged.
    """
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except FileNotFoundError:
        return 0.0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it; the answers stay.") from error
