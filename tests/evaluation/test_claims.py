"""The published table is quoted whole, and nothing of it appears as ours."""

import pytest
from made_calls import call

from flashmap_hf.evaluation.bench_summary import summarise
from flashmap_hf.evaluation.claims import COLUMNS, LABELS, PUBLISHED, compared


@pytest.fixture
def table() -> dict:
    results = [
        call(id="c", category="coding"),
        call("flashmap", kept=[0, 4, 4], drafted=4, draft=3.0, verify=12.0, id="c", category="coding"),
        call(id="q", category="qa"),
        call("flashmap", kept=[0, 1, 0], drafted=4, draft=3.0, verify=12.0, id="q", category="qa"),
    ]
    methods = [{"name": "plain"}, {"name": "flashmap", "drafter": {"block_size": 4}}]
    return compared(summarise(results, ["plain", "flashmap"]), methods, {"plain": 0, "flashmap": 2}, {"flashmap": 1.7})


def test_ours_stands_beside_each_claim(table):
    rows = {row["key"]: row for row in table["rows"]}
    assert rows.keys() == LABELS.keys() and table["unverified"] is True
    ours = {key: row["measured"]["flashmap"] for key, row in rows.items()}
    assert ours["block_size"] == 4 and ours["draft_passes"] == 1 and ours["drift"] == 2 and ours["own_figures"] == 1.7
    assert (ours["draft_ms"], ours["verify_ms"]) == (3.0, 12.0)
    assert ours["acceptance_1"] == ours["joint_1"] == 0.75
    assert ours["acceptance_4"] == 1.0 and ours["joint_4"] == 0.5 and ours["acceptance_6"] is None
    assert ours["tokens_per_step"] == 15 / 6
    coding = (11 / 0.060) / (4 / 0.060)
    assert ours["speedup_code"] == ours["speedup_peak"] == pytest.approx(coding)
    assert rows["tokens_per_step"]["measured"]["dflash"] is None  # not measured, so nothing stands there


def test_claims_are_as_published(table):
    rows = {row["key"]: row["claimed"] for row in table["rows"]}
    for column, numbers in PUBLISHED.items():
        for key, value in numbers.items():
            assert rows[key][column] == value
    assert rows["joint_6"] == rows["acceptance_6"]
    assert set(COLUMNS) == set(PUBLISHED)


def test_what_a_column_gives_by_itself(table):
    """The published latencies and tokens do not give the published speed-ups."""
    (row,) = (row for row in table["rows"] if row["key"] == "own_figures")
    assert row["claimed"]["plain"] == 1.0
    assert row["claimed"]["flashmap"] == pytest.approx(4.92 * 8.4 / (12.1 + 3.8))
    assert row["claimed"]["flashmap"] < 0.6 * PUBLISHED["flashmap"]["speedup_peak"]
