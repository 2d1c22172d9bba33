"""Our own prompts, and the turns of a prompt."""

from collections import Counter
from pathlib import Path

from flashmap_hf.evaluation.bench import QUICK
from flashmap_hf.evaluation.bench_prompts import Item, PromptSet, items_of
from flashmap_hf.prompt_files import PromptRow


def test_the_package_carries_32_prompts_over_the_categories():
    own = PromptSet.read(None)
    counts = Counter(row.category for row in own.rows)
    wanted = {"multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "coding"}
    assert len(own.rows) == 32 and wanted <= counts.keys() and min(counts.values()) >= 2
    assert all(row.later_turns for row in own.rows if row.category == "multi_turn")
    for row in own.rows:
        if row.category in ("summarization", "rag"):
            assert len(row.prompt.split()) > 120, row.id  # with a real passage
    assert own.to_dict()["file"] == "bench_prompts.jsonl" and own.to_dict()["in_file"] == 32


def test_the_first_prompts_are_of_different_categories():
    """What --quick takes: in turn from every category."""
    firsts = list(dict.fromkeys(row.category for row in PromptSet.read(None).rows))
    assert firsts[: QUICK["limit"]] == ["coding", "multi_turn", "summarization"]


def test_a_file_is_named_by_its_hash(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 1, "category": "writing", "turns": ["a", "b"]}\n')
    read = PromptSet.read(path)
    assert read.rows == [PromptRow("1", "a", "writing", ("b",))]
    assert len(read.sha256) == 64 and read.file == "p.jsonl"


def test_turns_are_items_of_their_own():
    rows = [PromptRow("a", "x", "c", ("y", "z")), PromptRow("b", "x")]
    assert items_of(rows, 2) == [Item(0, rows[0], 0), Item(1, rows[0], 1), Item(2, rows[1], 0)]
    assert [(item.id, item.category, item.turn) for item in items_of(rows, 1)] == [("a", "c", 0), ("b", "", 0)]
