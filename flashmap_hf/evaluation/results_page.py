"""Write what `flashmap bench` measured as a page with tables and plots; renew the short table in other texts.

A text has the short table between `<!-- benchmark -->` and `<!-- end benchmark -->`. Every number on the page and in
such a table is one of benchmark.json's.
"""

import json
import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from flashmap_hf.evaluation import bench_table, bench_verdict
from flashmap_hf.markdown import Record, how, table, where
from flashmap_hf.options import option

RESULT = "benchmark.json"
PICTURES = ("positions", "speedup", "times", "k")
IMAGES = "images"  # beside the page: a built site holds nothing from above its own folder
MARKED = re.compile(r"<!-- benchmark -->.*?<!-- end benchmark -->", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """Which measurements, and what to write."""

    folder: Path = option(help="where benchmark.json and its plots are")
    page: Path | None = option(None, "the page to write, as docs/results.md; its plots are put into images/ beside it")
    update: list[Path] = option(factory=list, help="texts whose marked tables are renewed, as README.md")
    check: bool = option(False, "write nothing; fail where a text is not what would be written")

    def __post_init__(self) -> None:
        if self.page is None and not self.update:
            raise ValueError("nothing to write: name a page with --page, or texts with --update.")


def main(options: Options) -> None:
    """Render everything, then write or compare it."""
    record = read(options.folder / RESULT)
    written: dict[Path, bytes] = {}
    if options.page is not None:
        written[options.page] = page(record, options.folder, options.page.parent).encode()
        for name in pictures(options.folder):
            written[options.page.parent / IMAGES / name] = (options.folder / name).read_bytes()
    for path in options.update:
        written[path] = updated(path, record, options.folder).encode()
    for path, content in written.items():
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.tmp")
            aside.write_bytes(content)
            aside.replace(path)
        elif not path.is_file() or path.read_bytes() != content:
            raise ValueError(f"{path} is not what {options.folder / RESULT} gives: run `flashmap results` again.")
        print(f"{path}: {'up to date' if options.check else 'written'}")


def pictures(folder: Path) -> list[str]:
    """The plots that the page shows, as `flashmap bench` wrote them to `folder`."""
    names = [f"benchmark_{name}.svg" for name in PICTURES]
    return [name for name in names if (folder / name).is_file()]


def read(path: Path) -> Record:
    """`benchmark.json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no record of a benchmark.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): run `flashmap bench` again.") from error
    if not isinstance(record, dict) or record.get("schema") != 1 or "provenance" not in record:
        raise ValueError(f"{path} is no record of schema 1 of `flashmap bench`: run it again.")
    found: Record = record
    return found


def link(folder: Path, start: Path) -> str:
    """How a text in `start` names `folder`."""
    return Path(os.path.relpath(folder, start)).as_posix()


def short_table(record: Record, file: str) -> str:
    """The block between the markers, markers included. file: how the text names benchmark.json."""
    region = f"<!-- numbers: {file} -->\n{table(*bench_table.summary(record))}\n<!-- end -->"
    return f"<!-- benchmark -->\n{region}\n<!-- end benchmark -->"


def updated(path: Path, record: Record, folder: Path) -> str:
    """The text of `path` with its marked table renewed.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no such markers.
    """
    text = path.read_text(encoding="utf-8")
    if not MARKED.search(text):
        raise ValueError(f"{path} has no place between <!-- benchmark --> and <!-- end benchmark -->: put the markers.")
    block = short_table(record, f"{link(folder, path.parent)}/{RESULT}")
    return MARKED.sub(lambda _: block, text)


def page(record: Record, folder: Path, start: Path) -> str:
    """The whole page; the same files give the same bytes. start: the folder that it stands in."""
    place = link(folder, start)
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )  # Markdown
    template = environment.from_string(
        (files("flashmap_hf.evaluation") / "results_template.md").read_text(encoding="utf-8")
    )

    def region(body: str) -> str:
        return f"<!-- numbers: {place}/{RESULT} -->\n{body}\n<!-- end -->"

    def shown(rows: bench_table.Rows) -> str:
        return region(table(*rows))

    low = record["drift"]["low_precision"]
    context: dict[str, Any] = {
        "record": record,
        "where": where(record),
        "how": how,
        "names": bench_table.labels(record),
        "tables": bench_table,
        "shown": shown,
        "region": region,
        "lines": "\n".join(f"- {line}" for line in bench_verdict.verdicts(record)),
        "pictures": {Path(name).stem: f"{IMAGES}/{name}" for name in pictures(folder)},
        "place": place,
        "how_far": f"{100 * record['cost_model'][0]['goal']:.0f}",
        "low": low and {"plain": low["plain_against_float32"], **low["methods"]},
    }
    return f"{template.render(context).rstrip()}\n"
