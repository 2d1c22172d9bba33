"""A few prompts of many, evenly from each category."""

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from flashmap_hf.prompt_files import PromptRow


def balanced(rows: Sequence[PromptRow], limit: int | None, per_category: int | None, seed: int) -> list[PromptRow]:
    """A seeded choice, in turn from every category and within it from its parts `a/b`; in the order of `rows`.

    limit: prompts in all; per_category: prompts of a category, its parts together. None: all.
    """
    parts: dict[str, list[PromptRow]] = {}
    for row in rows:
        parts.setdefault(row.category, []).append(row)
    categories: dict[str, list[list[PromptRow]]] = {}
    for name, part in parts.items():
        random.Random(f"{seed} {name}").shuffle(part)
        categories.setdefault(name.split("/")[0], []).append(part)
    chosen = in_turn([in_turn(part)[:per_category] for part in categories.values()])[:limit]
    ids = {row.id for row in chosen}
    return [row for row in rows if row.id in ids]


def in_turn(groups: Iterable[Sequence[PromptRow]]) -> list[PromptRow]:
    """The first of each, then the second of each that has one, ..."""
    return [row for turn in zip_longest(*groups) for row in turn if row is not None]
