"""What a step takes beside the two forwards, on a tiny pair."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_files import write_drafter, write_target

from flashmap_hf.evaluation import overhead


def test_every_way_is_measured_beside_plain(tmp_path: Path, capsys: Any) -> None:
    pair = ["--target", str(write_target(tmp_path / "target")), "--drafter", str(write_drafter(tmp_path / "drafter"))]
    out = tmp_path / "overhead.json"
    overhead.main([*pair, "--new-tokens", "8", "--rounds", "2", "--out", str(out)])
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["ways"].keys() == {"plain, greedy", "plain, sampled", *overhead.WAYS}
    printed = capsys.readouterr().out
    for name, row in record["ways"].items():
        assert 0 < row["lowest"] <= row["own_ms"] <= row["highest"], name
        assert 0 < row["steps"] < 8
        assert f"{row['own_ms']:.2f} ms a step" in printed
    assert {"commit", "command", "machine", "versions", "time"} <= record["provenance"].keys()


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--new-tokens", "7"]])
def test_bad_options_are_refused(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        overhead.main([*options, "--out", str(tmp_path / "out.json")])
