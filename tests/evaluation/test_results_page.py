"""The page of results and the marked tables hold what benchmark.json holds, and nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest
from bench_run import finished  # noqa: F401  # a fixture
from test_numbers import measured_outside, unproven_numbers

from flashmap_hf.cli import main
from flashmap_hf.evaluation import bench_table, bench_verdict, results_page

ROOT = Path(__file__).resolve().parents[2]
MARKERS = "# Title\n\n<!-- benchmark -->\nold\n<!-- end benchmark -->\n\nThe end.\n"


@pytest.fixture
def folder(finished, tmp_path) -> Path:  # noqa: F811
    """A copy to spoil."""
    return shutil.copytree(finished, tmp_path / "cards" / "out")


def write(folder: Path, *options: str) -> int:
    return main(["results", "--folder", str(folder), *options])


def change(folder: Path, **fields) -> None:
    path = folder / "benchmark.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_every_number_of_the_page_is_in_the_file(folder, tmp_path):
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    assert write(folder, "--page", str(page)) == 0
    text = page.read_text()
    assert text.count("<!-- numbers: ../cards/out/benchmark.json -->") > 15
    assert unproven_numbers(page) == [] and measured_outside(page) == []
    links = re.findall(r"!\[\w+\]\((.+?)\)", text)
    assert len(links) == 4 and all((page.parent / name).is_file() for name in links)
    assert "nobody verified them" in text and "PROJECTIONS, not measurements" in text
    assert "](../" not in text and str(tmp_path) not in text  # a site is built from its own folder
    assert write(folder, "--page", str(page), "--check") == 0
    (page.parent / links[0]).write_text("another picture")
    assert write(folder, "--page", str(page), "--check") == 2
    for heading in ("Against the trained baselines", "Block size", "Other drafters", "Cost model", "Drift"):
        assert f"## {heading}" in text
    spoilt = re.sub(r"\| (\d+\.\d\d) \|", "| 7777.77 |", text, count=1)
    page.write_text(spoilt)
    assert unproven_numbers(page) == ["7777.77"]


def test_a_text_is_renewed_between_its_markers_only(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(MARKERS)
    assert write(folder, "--update", str(readme), "--check") == 2
    assert "README.md is not what" in capsys.readouterr().err and readme.read_text() == MARKERS
    assert write(folder, "--update", str(readme)) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- benchmark -->\n<!-- numbers: cards/out/benchmark.json -->\n|  |")
    assert text.endswith("<!-- end -->\n<!-- end benchmark -->\n\nThe end.\n") and "old" not in text
    assert unproven_numbers(readme) == []
    assert write(folder, "--update", str(readme), "--check") == 0
    assert write(folder, "--update", str(readme)) == 0
    assert readme.read_text() == text
    readme.write_text(re.sub(r"\d+\.\d\d", "9.99", text, count=1))
    assert write(folder, "--update", str(readme), "--check") == 2


def test_this_repository_shows_what_its_benchmark_measured():
    """Where a drafter's folder holds benchmark.json, README and page are what it gives; else they state nothing."""
    readme, page = ROOT / "README.md", ROOT / "docs" / "results.md"
    measured = sorted(ROOT.glob("hub_cards/*/benchmark.json"))
    if measured:
        record, folder = results_page.read(measured[0]), measured[0].parent
        assert readme.read_text(encoding="utf-8") == results_page.updated(readme, record, folder)
        assert page.read_text(encoding="utf-8") == results_page.page(record, folder, page.parent)
    else:
        assert "|" not in results_page.MARKED.search(readme.read_text(encoding="utf-8"))[0]
        assert "<!-- numbers" not in page.read_text(encoding="utf-8")


# --- what it says ---------------------------------------------------------------------------------------------------


def test_losses_are_said(finished):  # noqa: F811
    record = json.loads((finished / "benchmark.json").read_text())
    group = record["temperatures"][0]["methods"]["flashmap"]
    group["overall"]["speedup"]["median"], group["categories"]["coding"]["speedup"]["median"] = 1.5, 0.9
    for part in ("multi", "multi/writing"):
        group["categories"][part]["speedup"]["median"] = 1.6
    for name, method in record["temperatures"][0]["methods"].items():
        if name != "flashmap":
            method["overall"]["speedup"]["median"] = 1.0 if name == "plain" else 1.2
    record["against_baselines"][0] |= {"ahead": False, "ratio": 0.8}
    for row in record["against_baselines"]:
        row["flashmap"] = "flashmap"
    record["drift"]["greedy"]["flashmap"]["differ"] = 1
    lines = "\n".join(bench_verdict.verdicts(record))
    assert "a median speed-up of 1.50x; the fastest method is FlashMap, one step with 1.50x." in lines
    assert "FlashMap is **slower** than plain decoding on coding.\n" in lines
    assert "FlashMap is **behind** DFlash (factorised block): greedy, 0.80 of its tokens per target step." in lines
    assert "Greedy outputs that **differ** from plain decoding's, which must not be: FlashMap, one step." in lines
    record["dtype"] = "bfloat16"
    assert "which rounding can explain" in bench_verdict.verdicts(record)[-1]


def test_wins_are_said(finished):  # noqa: F811
    record = json.loads((finished / "benchmark.json").read_text())
    for row in record["against_baselines"]:
        row["ahead"] = True
    for method in record["temperatures"][0]["methods"].values():
        method["overall"]["speedup"]["median"] = 1.0
    lines = bench_verdict.verdicts(record)
    assert lines[0].startswith("Greedy: FlashMap, one step, makes") and "no method beats plain decoding" in lines[0]
    assert "FlashMap, trained as the baselines is ahead of every trained baseline in tokens per target step." in lines
    assert lines[-1] == "Every greedy output is token for token that of plain decoding."


def test_unequal_training_is_said():
    def rows(*pairs):
        return [{"flashmap_blocks": ours, "baseline_blocks": theirs} for ours, theirs in pairs]

    assert bench_verdict.training_of(rows((1000, 1000), (1000, 1050))) == []
    (line,) = bench_verdict.training_of(rows((9000, 1000), (9000, 8500)))
    assert "**not trained equally**" in line and "9,000 blocks" in line and "1,000" in line
    (line,) = bench_verdict.training_of(rows((9000, None)))
    assert "not in the record" in line


def test_tables_are_rectangular_and_the_best_is_bold(finished):  # noqa: F811
    record = json.loads((finished / "benchmark.json").read_text())
    run = record["temperatures"][0]
    tables = [
        bench_table.results(record, run),
        bench_table.summary(record),
        bench_table.by_category(record, run, bench_table.tokens_per_step),
        bench_table.positions(record, run, "joint"),
        bench_table.memory(record),
        bench_table.k_curve(record),
        bench_table.variants(record),
        bench_table.against_baselines(record),
        bench_table.suffix(record),
        bench_table.cost_model(record),
        bench_table.claims(record),
        bench_table.sampled_drift(record["drift"]["sampled"][0], bench_table.labels(record)),
    ]
    for head, rows in tables:
        assert rows and {len(row) for row in rows} == {len(head)}
    head, rows = tables[2]
    for column in range(1, len(head)):
        cells = [row[column] for row in rows]
        values = [float(cell.strip("*")) for cell in cells]
        assert {value for value, cell in zip(values, cells, strict=True) if "*" in cell} == {max(values)}


# --- what it refuses ------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named(folder, tmp_path, capsys):
    def complaint(*options: str) -> str:
        assert write(folder, *options) == 2
        return capsys.readouterr().err

    assert "nothing to write: name a page with --page" in complaint()
    (tmp_path / "bare.md").write_text("no markers")
    assert "bare.md has no place between <!-- benchmark -->" in complaint("--update", str(tmp_path / "bare.md"))
    page = ["--page", str(tmp_path / "page.md")]
    change(folder, schema=99)
    assert "benchmark.json is no record of schema 1" in complaint(*page)
    (folder / "benchmark.json").write_text("{")
    assert "benchmark.json is not JSON" in complaint(*page)
    (folder / "benchmark.json").unlink()
    assert "benchmark.json" in complaint(*page)
    assert not (tmp_path / "page.md").exists()
