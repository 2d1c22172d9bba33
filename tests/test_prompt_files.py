"""Prompt files: our rows, Spec-Bench and HumanEval; what is wrong is named with its line."""

import json
from pathlib import Path

import pytest

from flashmap_hf.prompt_files import PromptRow, read_prompts


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_rows_of_all_kinds(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        {"id": "x", "prompt": "Hello\u2028there", "category": "chat"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "canonical_solution": "..."},
        {"prompt": "no name"},
    )
    assert read_prompts(path) == [
        PromptRow("x", "Hello\u2028there", "chat"),
        PromptRow("81", "First.", "writing", ("Second.",)),
        PromptRow("HumanEval/0", "def f():", "coding"),
        PromptRow("5", "no name", ""),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object, but list"),
        ({"text": "hi"}, "line 2: needs a text under `prompt`"),
        ({"prompt": "  "}, "line 2: needs a text"),
        ({"turns": []}, "line 2: needs a text"),
        ({"turns": ["good", None]}, "line 2: needs a text"),
        ({"prompt": 3}, "line 2: needs a text"),
        ('{"prompt": "\\ud800"}', "line 2: the prompt holds half of a surrogate"),
        ({"id": "a", "prompt": "again"}, "line 2: id 'a' is already on line 1"),
        ("[" * 100_000, "line 2: not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = written(tmp_path / "a.jsonl", {"id": "a", "prompt": "good"}, row)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(written(tmp_path / "a.jsonl", ""))
    with pytest.raises(OSError, match=r"b\.jsonl"):
        read_prompts(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "c.jsonl")
