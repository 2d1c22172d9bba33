"""The throughput table counts blocks, times both parts of a step and counts its arithmetic."""

import json
from pathlib import Path

import pytest

from flashmap_hf.training import throughput


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "matrix_rate", lambda *_: 100.0)
    out = tmp_path / "throughput.json"
    args = ["--block-sizes", "2", "4", "--windows", "1", "--runs", "1", "--layers", "1", "--draft-vocab", "64"]
    throughput.main([*args, "--rounds", "1", "--out", str(out)])
    record = json.loads(out.read_text())
    small, large = record["rows"]
    assert (small["block_size"], large["block_size"]) == (2, 4) and small["blocks"] == large["blocks"] == 16
    assert large["flop"] > 1.4 * small["flop"]  # five slots against three
    for row in record["rows"]:
        seconds = row["seconds_losses"] + row["seconds_optimisers"]
        assert row["blocks_per_second"] == pytest.approx(16 / seconds)
        assert row["share_of_matrix_rate"] == pytest.approx(row["flop"] / row["seconds_losses"] / 1e9 / 100.0)
    with pytest.raises(SystemExit):
        throughput.main(["--rounds", "0", "--out", str(out)])
