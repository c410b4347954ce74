"""The measurement of the input pipeline, from end to end, on a few images."""

from __future__ import annotations

import json
from pathlib import Path

import input as bench
import pytest

pytest.importorskip("contrib.shards")


@pytest.mark.slow
def test_every_side_is_measured(tmp_path: Path) -> None:
    found = bench.main(["--quick", "--out", str(tmp_path)])
    assert {level: len(rows) for level, rows in found.items()} == {
        "transform": 4 + 2 * len(bench.BACKENDS),
        "loader": 4 + len(bench.BACKENDS) + 2,
    }
    written = "".join(path.read_text() for path in tmp_path.glob("input-*.md"))
    for rows in found.values():
        assert rows[0]["ratio"] == 1
        assert all(f"| {row['side']} | " in written for row in rows)
        assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)
    (record,) = tmp_path.glob("input-*.json")
    assert 80 < json.loads(record.read_text())["kilobytes_a_file"] < 120
