"""The cost model against calls whose costs are known."""

import pytest
from made_calls import call

from flashmap_hf.evaluation import cost_model
from flashmap_hf.evaluation.cost_model import check, expected_speedup, projections
from flashmap_hf.evaluation.memory import Footprint
from flashmap_hf.evaluation.methods import Method

PLAIN = Method("plain", "plain", lambda *_: None)


def method(name: str, **fields) -> Method:
    return Method(name, name, lambda *_: None, **fields)


def test_the_formula():
    assert expected_speedup(4.0, 1.5, 0.5) == 2.0


def test_expected_is_measured_where_every_step_costs_the_same():
    kept = {"a": [0, 3, 3, 3], "b": [0, 1, 0, 1], "c": [0, 0, 2, 0]}
    results = [call(id=name, category=name) for name in kept]
    results += [call("fast", kept=k, drafted=4, draft=2.0, verify=12.0, id=n, category=n) for n, k in kept.items()]
    (row,) = check(results, [PLAIN, method("fast")])
    assert row["tokens_per_step"] == 1 + 13 / 9
    assert row["verify_ratio"] == pytest.approx(1.2) and row["draft_ratio"] == pytest.approx(0.2)
    assert row["expected"] == pytest.approx(row["measured"]) == pytest.approx((1 + 13 / 9) / 1.4)
    assert row["within_goal"] is True
    assert [(group["category"], round(group["error"], 9)) for group in row["categories"]] == [
        ("a", 0.0), ("b", 0.0), ("c", 0.0)
    ]  # fmt: skip


def test_a_category_with_other_costs_is_seen():
    """It is expected to have the costs of the others; its own ones are twice as high."""
    results = [call(id=name, category=name) for name in "ab"]
    results.append(call("fast", kept=[0, 1, 1], drafted=1, verify=10.0, id="a", category="a"))
    results.append(call("fast", kept=[0, 1, 1], drafted=1, verify=20.0, id="b", category="b"))
    (row,) = check(results, [PLAIN, method("fast")])
    a, b = row["categories"]
    assert (a["expected"], a["measured"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (b["expected"], b["measured"]) == (pytest.approx(2.0), pytest.approx(1.0))
    assert a["error"] == pytest.approx(-0.5) and b["within_goal"] is False


def test_what_cannot_be_compared_is_left_out():
    results = [call(), call("once"), call("short", kept=[0]), call("alone", id="other")]
    names = [PLAIN, method("once", once=True), method("short"), method("alone")]
    assert check(results, names) == []


def test_projections_say_whose_ratios_they_use():
    results = [call(), call("flashmap", kept=[0, 2, 2], drafted=4), call("eagle", kept=[0, 2, 2], drafted=3)]
    block = method("flashmap", footprint=Footprint(read_bytes=50))
    token = method("eagle", footprint=Footprint(read_bytes=50, per_token=True))
    rows = {(r["method"], r["ratios_of"]): r for r in projections(results, [PLAIN, block, token], 500)}
    assert rows["flashmap", "memory_bound"]["expected"] == pytest.approx(3.0 / 1.1)
    assert rows["eagle", "memory_bound"]["draft_ratio"] == pytest.approx(0.3)  # three passes a block
    published = rows["flashmap", "published"]
    assert (published["verify_ratio"], published["draft_ratio"]) == (12.1 / 8.4, 3.8 / 8.4)
    assert cost_model.published_ratios("plain") is None and cost_model.published_ratios("medusa") is None
