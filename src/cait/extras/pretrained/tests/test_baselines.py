"""The baselines beside a run: their figures against scikit-learn's own, and where they are shown."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from harness import DEVICES
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cait import plugins
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras.features import extract
from cait.extras.pretrained import baselines
from cait.train.module import CaiTModule

FEW = ["--trainer.max_epochs=2", "--data.num_workers=0", "--model.fields.depth=1", *DEVICES]
NAMES = ["chance", "logistic regression", "linear probe"]


def test_the_regression_is_scikit_learns_on_the_digits_themselves(digits_root: Path) -> None:
    """The oracle has the digits of the package; the baseline has read them from files, as RGB.

    Three channels alike share a weight among them, which a penalty of a third does too.
    """
    data = ImageNetDataModule(
        root=str(digits_root), img_size=8, crop_pct=1.0, num_workers=0, batch_size=2
    )
    data.setup()
    network, sets = (
        timm.create_model("test_resnet", num_classes=10),
        (data.train_images, data.val_images),
    )
    train, val = (
        extract(network, each.samples, data, torch.device("cpu"), pixels=True) for each in sets
    )
    digits = load_digits()
    held_out = sorted(int(file.stem) for file in digits_root.glob("val/*/*.png"))
    kept = np.setdiff1d(np.arange(len(digits.target)), held_out)
    pixels = np.round(digits.data * (255 / 16)).astype(np.float32)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=3, max_iter=1000))
    score = 100 * model.fit(pixels[kept], digits.target[kept]).score(
        pixels[held_out], digits.target[held_out]
    )
    found = {row["name"]: row for row in baselines.scores(train, val, 10, {})}
    assert list(found) == NAMES
    assert found["logistic regression"]["acc1"] == pytest.approx(score, abs=0.3)  # one image of 360
    assert found["chance"]["acc1"] == pytest.approx(100 / 10, abs=1)
    bare = (
        extract(network, each.samples, data, torch.device("cpu"), pixels=True, features=False)
        for each in sets
    )
    of_head = [*baselines.scores(*bare, 10, {"acc1": 41.0})]
    assert [row["name"] for row in of_head] == [NAMES[0], NAMES[2], NAMES[1]]
    assert (of_head[1]["acc1"], of_head[2]["acc1"]) == (41.0, found["logistic regression"]["acc1"])
    few = val.at(val.labels == 7)  # a folder's largest class may have no image to validate on
    assert next(baselines.scores(train, few, 10, {}))["acc1"] == 100
    with pytest.raises(UserError, match="no validation image counts"):
        next(baselines.scores(train, val.at(val.labels < 0), 10, {}))
    answers, labels = np.array([0, 1, 1, 3, 0]), np.array([0, 1, 0, 0, 3])
    assert baselines.accuracies(answers, labels)["acc1_macro"] == 100 * balanced_accuracy_score(
        labels, answers
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """A run on a folder, by its recipe."""
    place = tmp_path_factory.mktemp("baselines")
    slow = "--model.lr=1e-5"  # for a run that the regression beats
    main(
        [
            "fit",
            f"--data.root={digits_root}",
            *FEW,
            slow,
            f"--trainer.default_root_dir={place}",
            "--run_name=own",
        ]
    )
    return place / "own"


@pytest.mark.slow
def test_a_run_on_a_folder_has_them_in_its_file_and_its_summary(
    run: Path, tmp_path, monkeypatch, capsys
) -> None:
    found = json.loads((run / baselines.FILE).read_text())
    assert [entry["name"] for entry in found["baselines"]] == NAMES
    assert found["baselines"][1]["acc1"] > 90 > 20 > found["baselines"][0]["acc1"]
    shutil.copytree(run, tmp_path / "own")
    (tmp_path / "own" / baselines.FILE).write_text("stale")
    main(["resume", str(tmp_path / "own"), "--trainer.max_epochs=3"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    again = json.loads((tmp_path / "own" / baselines.FILE).read_text())
    assert again["run"] >= found["run"]  # the best so far
    assert again["baselines"][1]["acc1"] == found["baselines"][1]["acc1"]
    shown = (
        f"{again['baselines'][1]['acc1']:.2f} % on the pixels",
        "points better than this run",
        "try published",
    )
    assert all(words in out for words in shown) or "screen" not in plugins.extras()

    for epochs, error, told in (
        (4, ValueError("no room\nfor this"), "no room"),
        (5, KeyboardInterrupt(), "Keyboard"),
    ):
        monkeypatch.setattr(baselines, "classify", classify := Mock(side_effect=error))
        main(["resume", str(tmp_path / "own"), f"--trainer.max_epochs={epochs}"])
        out = capsys.readouterr().out
        assert f"no baselines: {told}" in out
        assert classify.call_count == 1
        assert not (tmp_path / "own" / baselines.FILE).exists()


def found(run_acc1: float, best: float) -> dict:
    scores = {"how": "so", "seconds": 1.0}
    rows = [
        {"name": "chance", "score": 10.0, **scores},
        {"name": "<regression>", "score": best, **scores},
    ]
    return {"how": "its best.ckpt", "metric": "top-1", "run": run_acc1, "baselines": rows}


def suggested(folder: Path, **settings: object) -> list[str]:
    names = dict(folder=folder, module=CaiTModule(**settings), program=SimpleNamespace(script=None))
    run: plugins.Run = SimpleNamespace(**names)  # type: ignore[assignment]
    return [line for _, line in baselines.Baselines(run).suggestions()]


def test_a_better_baseline_is_said_with_what_to_try(tmp_path: Path) -> None:
    (tmp_path / baselines.FILE).write_text(json.dumps(found(50.0, 62.5)))
    table = plugins.results(tmp_path)[0]
    assert [row[0] for row in table.rows] == ["<regression>", "this run", "chance"]
    assert table.note == "<regression>: 12.50 points better than this run"
    assert table.head[-1] == "top-1"
    more = "more time: --minutes 10"
    assert suggested(tmp_path) == ["published weights: --from timm", more]
    assert (
        suggested(tmp_path, pretrained=True) == suggested(tmp_path, weights="my lite.pth") == [more]
    )
    # not better by what rounding makes of it
    for ours in (
        63.0,
        62.5,
        float(torch.tensor(62.499)),
    ):
        (tmp_path / baselines.FILE).write_text(json.dumps(found(ours, 62.5)))
        assert (plugins.results(tmp_path)[0].note, suggested(tmp_path)) == ("", [])
