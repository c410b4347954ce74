"""The measurement of the input pipeline, from end to end, on a few images."""

from __future__ import annotations

import json
from pathlib import Path

import input as bench
import pytest

pytest.importorskip("contrib.shards")


@pytest.mark.slow
def test_every_side_is_measured(tmp_path: Path) -> None:
    found = bench.main(["--quick", "--batches", "2", "--backends", "pillow", "--out", str(tmp_path)])
    backends, missing = bench.available()
    codec = "nvimgcodec" in backends
    assert codec or "nvimgcodec" in missing[0]
    assert {level: len(rows) for level, rows in found.items()} == {
        "decode": 2 + 2 * codec,
        "crop": 2 + codec,
        "operations": 15,
        "transform": 4 + 2 * len(backends),
        "loader": 4 + len(backends) + 2,
        "shards": 2,
        "s3": 4,
    }
    folder, windowed, kept, alone = (row["requests"] for row in found["s3"])
    assert folder == 0
    assert 0 < windowed <= 0.6  # two images in a chunk
    assert 0 < kept <= 0.6
    assert alone == 1
    written = "".join(path.read_text() for path in tmp_path.glob("input-*.md"))
    operations = found.pop("operations")
    assert all(
        row["largest"] <= 1 and row["mean"] < 0.1 and f"| {row['operation']} | " in written for row in operations
    )
    for rows in found.values():
        assert rows[0]["ratio"] == 1
        assert all(f"| {row['side']} | " in written for row in rows)
        assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(row["difference"] < 0.1 for row in found["crop"])
    assert "pillow: 2 batches of 4" in written
    (record,) = tmp_path.glob("input-*.json")
    assert 80 < json.loads(record.read_text())["kilobytes_a_file"] < 120


@pytest.mark.slow
def test_the_processor_time_of_all_processes_is_counted(tmp_path: Path) -> None:
    found = bench.main(["--quick", "--levels", "tree", "--out", str(tmp_path)])
    ways = {level: [name for name, (side, _) in ways.items() if side in OWN] for level, ways in bench.WAYS.items()}
    for level, names in ways.items():
        rows = {row["side"]: row for row in found[level]}
        assert set(names) <= set(rows)
        # two workers on a few images: the seconds of all processes are those of a clock, or up to three times as many
        assert all(0 < row["seconds"] < 4 * row["wall"] for row in rows.values())
    (record,) = tmp_path.glob("input-*.json")
    sizes = json.loads(record.read_text())["kilobytes"]
    assert sizes["small"] < sizes["shards"] < sizes["raw-small"] < sizes["raw"]
    assert sizes["raw"] == pytest.approx(3 * 500 * 375 / 1e3, rel=0.01)


OWN = ("ours", "repeated", "timm", "torchvision")
