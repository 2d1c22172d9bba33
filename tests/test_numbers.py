"""Every measured number in README, cards and docs stands in the JSON file that it names.

A region `<!-- numbers: path.json [path.json ...] -->` ... `<!-- end -->` may show only numbers that its files hold,
rounded as shown (or as a percentage). Outside of such regions the texts state no measured number at all.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "hub_cards").glob("*/README.md")])
REGION = re.compile(r"<!-- numbers: (?P<files>[^>]+?) -->(?P<body>.*?)<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.-])(?P<digits>\d+(?:,\d{3})*(?:\.(?P<fraction>\d+))?)(?P<unit> ?%)?(?=x\b|\W|$)")
MEASURED = re.compile(r"\d+(?:\.\d+)?(?:x\b| ?×| ms\b| tokens/s| tokens per (?:target )?step| blocks/s)")


def leaves(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, and the lengths that count something; booleans are not numbers."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def shown(number: re.Match[str], values: list[float]) -> bool:
    """Whether some value, rounded as the number is written, is the number."""
    text = number["digits"].replace(",", "")
    places = len(number["fraction"] or "")
    scale = 100.0 if number["unit"] else 1.0
    return any(f"{value * scale:.{places}f}" == text for value in values)


def wrong_numbers(body: str, values: list[float]) -> list[str]:
    return [number[0] for number in NUMBER.finditer(body) if not shown(number, values)]


def unproven_numbers(path: Path) -> list[str]:
    """The numbers in the regions of a text that none of the files named there holds."""
    found = []
    for region in REGION.finditer(path.read_text(encoding="utf-8")):
        values = []
        for name in region["files"].split():
            record = json.loads((path.parent / name).read_text(encoding="utf-8"))
            assert {"commit", "command", "machine", "versions", "time"} <= record["provenance"].keys(), name
            values += list(leaves(record))
        found += wrong_numbers(region["body"], values)
    return found


def measured_outside(path: Path) -> list[str]:
    """What reads like a measurement and stands in no region."""
    return MEASURED.findall(REGION.sub("", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_numbers_are_in_the_files_that_they_name(path: Path) -> None:
    assert not unproven_numbers(path)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_measured_is_stated_outside_of_a_region(path: Path) -> None:
    assert not measured_outside(path)


def test_the_check_can_fail() -> None:
    values = list(leaves({"a": [1.846, {"b": 0.374}], "n": 12345, "ok": True}))
    assert wrong_numbers("| 1.85x | 37 % | 12,345 | 37.4 % | SmolLM2-135M |", values) == []
    assert wrong_numbers("| 1.86x | 38 % | 12,346 | 1 |", values) == ["1.86", "38 %", "12,346", "1"]
