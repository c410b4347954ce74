"""What the paper and timm published, beside the scores of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cait.cli import main
from cait.extras.paper.rows import Row, released, rows

CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]  # the tests' own process could not start others


# timm's results, written down once more: model and resolution, then ImageNet, ReaL and ImageNet-V2.
TIMM = {
    "xxs24-224": (78.400, 85.240, 67.29),
    "xxs36-224": (79.750, 86.323, 68.37),
    "xxs24-384": (80.954, 87.414, 70.55),
    "xxs36-384": (82.204, 88.161, 72.14),
    "s24-224": (83.484, 88.447, 73.01),
    "xs24-384": (84.064, 89.169, 74.11),
    "s24-384": (85.048, 89.510, 75.38),
    "s36-384": (85.458, 89.829, 76.01),
    "m36-384": (86.060, 90.049, 76.37),
    "m48-448": (86.480, 90.181, 76.84),
}


def test_timms_figures_stand_with_the_released_weights() -> None:
    listed = {row.name.removesuffix("-distilled"): tuple(row.timm.values()) for row in rows().values() if row.timm}
    assert listed == TIMM
    for id, (acc1, real, v2) in TIMM.items():
        name, img_size = id.split("-")
        row = released(name, int(img_size))
        assert row is not None
        assert row.settings["model.distillation"] == "hard"
        assert row.timm == {"acc1": acc1, "real": real, "v2": v2}
        assert abs(acc1 - row.published["paper"]["acc1"]) < 0.06  # the same weights, as the paper rounds them
    assert released("s36", 224) is None


def test_a_run_of_a_row_is_scored_beside_what_was_published(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cait"])
    row = "models/s36-384-distilled"
    small = [
        *CPU,
        f"--data.root={digits_root}",
        "--data.img_size=16",
        "--data.batch_size=64",
        "--data.num_workers=0",
    ]
    fields = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
    small += [f"--model.fields.{name}={value}" for name, value in fields.items()]
    brief = ["--trainer.max_steps=1", "--model.warmup_epochs=0", "--model.distillation=none", "--run_name=mine"]
    main(["fit", "--paper", row, *small, *brief, "--model.weights=null"])
    capsys.readouterr()

    main(["eval", "mine", "--output=found/other.json"])
    other = json.loads(Path("found/other.json").read_text())
    assert (other["paper_row"], other["published"]) == (None, {})  # ten classes and another network are not the row's
    assert "85.4" not in capsys.readouterr().out

    monkeypatch.setattr(Row, "is_of", lambda *_: True)  # the row's own network is too large for a test
    published = {"paper": {"acc1": 85.4}, "timm": {"acc1": 85.458, "real": 89.829, "v2": 76.01}}
    main(["eval", "mine", "--extra.v2", str(digits_root / "val"), "--output=found/mine.json"])  # the run knows its row
    shown = capsys.readouterr().out
    found = json.loads(Path("found/mine.json").read_text())
    assert (found["paper_row"], found["published"]) == (row, published)
    assert found["raw"]["extra"]["v2"]["confusion"] == found["raw"]["confusion"]
    for title, *figures in (("top-1", "85.4 %", "85.458 %"), ("ReaL top-1", "89.829 %"), ("v2 top-1", "76.01 %")):
        line = next(line for line in shown.splitlines() if line.startswith(f"│ {title} "))
        assert [cell.strip() for cell in line.split("│")[-len(figures) - 1 : -1]] == figures
