"""Numbers of a method from calls whose times and counts are known."""

import pytest
from made_calls import call

from flashmap_hf.evaluation.bench_summary import curve, quantile, summarise


def test_the_numbers_of_a_method():
    results = [
        call(kept=[0] * 7, id="a", category="x/y"),  # 30 + 6 * 10 = 90 ms, 7 tokens
        call("fast", kept=[0, 2, 2], drafted=2, draft=5.0, id="a", category="x/y"),  # 30 + 2 * 15 = 60 ms, 7 tokens
        call(kept=[0] * 7, id="b", category="z"),
        call("fast", kept=[0, 2, 0, 2], drafted=2, draft=5.0, id="b", category="z", session=2),  # 75 ms, 8 tokens
    ]
    summed = summarise(results, ["plain", "fast", "absent"])
    assert list(summed) == ["plain", "fast"]
    fast = summed["fast"]["overall"]
    assert list(summed["fast"]["categories"]) == ["x", "x/y", "z"]
    assert (fast["prompts"], fast["calls"], fast["new_tokens"], fast["target_steps"]) == (2, 2, 15, 7)
    assert fast["tokens_per_step"] == 15 / 7
    first, second = fast["positions"]
    assert (first["drafted"], first["judged"], first["accepted"]) == (5, 5, 4)
    assert (second["drafted"], second["judged"], second["accepted"]) == (5, 4, 4)
    assert (first["joint"], second["joint"], second["conditional"]) == (0.8, 0.8, 1.0)
    assert (fast["draft_ms"], fast["verify_ms"], fast["step_ms"], fast["first_token_ms"]) == (5.0, 10.0, 15.0, 30.0)
    # 12 tokens came in blocks of three within 15 ms, one alone
    assert fast["token_gap_ms"] == {"p50": 5.0, "p95": 15.0}
    per_second = (7 / 0.060, 8 / 0.075)
    ratios = [rate / (7 / 0.090) for rate in per_second]
    assert fast["speedup"] == pytest.approx({"median": sum(ratios) / 2, "lowest": min(ratios), "highest": max(ratios)})
    assert fast["pairs"] == 2 and fast["pairs_of_two_sessions"] == 1
    assert summed["plain"]["overall"]["speedup"]["median"] == 1.0
    assert summed["fast"]["categories"]["z"]["speedup"]["median"] == pytest.approx(ratios[1])


def test_a_prompts_speedup_is_the_median_of_its_own_rounds():
    """Paired: a round in which the whole machine is slow changes nothing."""
    slow = [1.0, 3.0, 1.0]
    results = [call(verify=10.0 * s, seconds=0.1 * s, round=i) for i, s in enumerate(slow)]
    results += [call("fast", seconds=0.05 * s, round=i) for i, s in enumerate(slow)]
    overall = summarise(results, ["fast"])["fast"]["overall"]
    assert overall["speedup"]["median"] == pytest.approx(2.0)
    assert overall["speedup_noise"] == pytest.approx(0.0)


def test_one_token_has_no_step_after_the_prefill():
    overall = summarise([call(kept=[0])], ["plain"])["plain"]["overall"]
    assert overall["draft_ms"] is None and overall["token_gap_ms"] == {"p50": None, "p95": None}
    assert overall["positions"] == [] and overall["tokens_per_step"] == 1.0


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.95, 4), (1.0, 4), (0.01, 1)])
def test_quantiles(share, expected):
    assert quantile([1, 2, 3, 4], share) == expected


def test_the_curve_has_a_point_per_block_size():
    results = [call(category="c"), call("k1", kept=[0, 1], category="c"), call("k2", kept=[0, 2], category="c")]
    points = curve(results, "block_size", {"k1": 1, "k2": 2, "k3": 3})
    assert [point["block_size"] for point in points] == [1, 2]
    assert [point["tokens_per_step"] for point in points] == [1.5, 2.0]
    assert points[0]["categories"]["c"]["speedup"] == points[0]["speedup"]
