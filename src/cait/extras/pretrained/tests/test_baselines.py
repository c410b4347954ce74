"""The baselines beside a run: their figures against scikit-learn's and torch's own, and where they are shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from harness import DEVICES
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cait
from cait import plugins
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.extras import probes
from cait.extras.extract import extract
from cait.extras.pretrained import baselines
from cait.train.module import CaiTModule

FEW = ["--trainer.max_epochs=2", "--data.num_workers=0", "--model.fields.depth=1", *DEVICES]


def test_the_regression_is_scikit_learns_on_the_digits_themselves(digits_root: Path) -> None:
    """The oracle has the digits of the package; the baseline has read them from files, as RGB."""
    data = ImageNetDataModule(root=str(digits_root), img_size=8, crop_pct=1.0, num_workers=0, batch_size=2)
    data.setup()
    network, sets = timm.create_model("test_resnet", num_classes=10), (data.train_images, data.val_images)
    train, val = (extract(network, each.samples, data, torch.device("cpu"), pixels=True) for each in sets)
    digits = load_digits()
    held_out = sorted(int(file.stem) for file in digits_root.glob("val/*/*.png"))
    kept = np.setdiff1d(np.arange(len(digits.target)), held_out)
    pixels = np.round(digits.data * (255 / 16)).astype(np.float32)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(pixels[kept], digits.target[kept])
    score = 100 * model.score(pixels[held_out], digits.target[held_out])
    answers, how = probes.on_pixels(train, val, 10)
    assert how == "scikit-learn, on the pixels"
    assert probes.accuracies(answers, val.labels)["acc1"] == pytest.approx(score, abs=0.3)  # one image of 360
    assert probes.accuracies(probes.chance(train, val, 10)[0], val.labels)["acc1"] == pytest.approx(100 / 10, abs=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A run on a folder, by its recipe."""
    place = tmp_path_factory.mktemp("baselines")
    slow = "--model.lr=1e-5"  # for a run that the regression beats
    main(["fit", f"--data.root={digits_root}", *FEW, slow, f"--trainer.default_root_dir={place}", "--run_name=own"])
    return place / "own"


def test_a_run_on_a_folder_has_them_in_its_file_and_its_summary(run: Path, tmp_path, capsys) -> None:
    found = json.loads((run / baselines.FILE).read_text())
    assert [entry["name"] for entry in found["baselines"]] == list(probes.ANSWERS)
    assert found["baselines"][1]["acc1"] > 90 > 20 > found["baselines"][0]["acc1"]
    shutil.copytree(run, tmp_path / "own")
    (tmp_path / "own" / baselines.FILE).write_text("stale")
    main(["resume", str(tmp_path / "own"), "--trainer.max_epochs=3"])
    out = capsys.readouterr().out
    again = json.loads((tmp_path / "own" / baselines.FILE).read_text())
    assert again["run"] >= found["run"]  # the best so far
    assert again["baselines"][1]["acc1"] == found["baselines"][1]["acc1"]
    assert f"{again['baselines'][1]['acc1']:.2f} %   scikit-learn, on the pixels" in out
    assert re.search(
        r"logistic regression: \d+\.\d+ points better than this run", " ".join(out.replace("│", " ").split())
    )
    assert "--minutes 10" in out


def test_no_other_run_has_them(digits_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"--trainer.default_root_dir={tmp_path}"
    config = Path(cait.__file__).parents[2] / "configs/digits.yaml"
    main(["fit", f"--config={config}", f"--data.root={digits_root}", *FEW, "--trainer.max_steps=2", place])
    assert "baselines" not in capsys.readouterr().out
    assert not list(tmp_path.rglob(baselines.FILE))


def test_a_failure_is_a_line_and_the_run_ends_well(run, tmp_path, monkeypatch, capsys) -> None:
    shutil.copytree(run, tmp_path / "own")

    def fails(*_: object) -> None:
        raise ValueError("no room\nfor this")

    monkeypatch.setitem(probes.ANSWERS, "logistic regression", fails)
    main(["resume", str(tmp_path / "own"), "--trainer.max_epochs=3"])
    out = capsys.readouterr().out
    assert "no baselines: no room" in out
    assert "trained" in out
    assert not (tmp_path / "own" / baselines.FILE).exists()


def found(run_acc1: float, best: float) -> dict:
    scores = {"how": "so", "seconds": 1.0}
    rows = [{"name": "chance", "score": 10.0, **scores}, {"name": "<regression>", "score": best, **scores}]
    return {"how": "its best.ckpt", "metric": "top-1", "run": run_acc1, "baselines": rows}


def test_a_better_baseline_is_said_with_what_to_try(tmp_path: Path) -> None:
    (tmp_path / baselines.FILE).write_text(json.dumps(found(50.0, 62.5)))
    table = plugins.results(tmp_path)[0]
    assert [row[0] for row in table.rows] == ["<regression>", "this run", "chance"]
    assert table.note == "<regression>: 12.50 points better than this run"
    assert table.head[-1] == "top-1"
    for ours in (63.0, 62.5, float(torch.tensor(62.499))):  # not better by what rounding makes of it
        (tmp_path / baselines.FILE).write_text(json.dumps(found(ours, 62.5)))
        assert (plugins.results(tmp_path)[0].note, baselines.suggestions(ended(tmp_path, {}))) == ("", [])


def ended(folder: Path, settings: dict) -> SimpleNamespace:
    """A run of these settings that has just ended."""
    (folder / "config.yaml").touch()
    module = CaiTModule(**settings)
    names = SimpleNamespace(config=SimpleNamespace(baselines=True), data=SimpleNamespace(root="my photos"))
    return SimpleNamespace(folder=folder, module=module, program=SimpleNamespace(script=None), **vars(names))


LITE = "--model.name timm/test_efficientnet"


@pytest.mark.parametrize(
    ("settings", "weights_first", "longer"),
    [
        ({}, "DATA='my photos' FROM=timm", "DATA='my photos' ARGS=\"--minutes 10\""),
        (
            {"name": "timm/test_efficientnet"},
            f"DATA='my photos' FROM=timm ARGS=\"{LITE}\"",
            f"DATA='my photos' ARGS=\"{LITE} --minutes 10\"",
        ),
        (
            {"name": "timm/test_efficientnet", "weights": "my lite.pth"},
            None,
            f"DATA='my photos' FROM='my lite.pth' ARGS=\"{LITE} --minutes 10\"",
        ),
        ({"pretrained": True}, None, "DATA='my photos' FROM=timm ARGS=\"--minutes 10\""),
    ],
)
def test_what_to_try_is_weights_first_and_keeps_them(
    settings: dict, weights_first: str | None, longer: str, tmp_path: Path
) -> None:
    (tmp_path / baselines.FILE).write_text(json.dumps(found(50.0, 62.5)))
    run = ended(tmp_path, settings)
    first = [("try", f"make train {weights_first}")] if weights_first else []
    assert baselines.suggestions(run) == [*first, ("try", f"make train {longer}")]
    os.utime(tmp_path / "config.yaml", (time.time() - 700,) * 2)  # of a run that had more time
    assert baselines.suggestions(run) == first
