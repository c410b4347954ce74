"""The baselines beside a run: their figures against scikit-learn's own, and where they are shown."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from harness import DEVICES
from modules import images_in
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cait import plugins
from cait.cli import main
from cait.errors import UserError
from cait.extras.features import extract
from cait.extras.pretrained import baselines
from cait.train.module import CaiTModule

NAMES = ["chance", "logistic regression", "linear probe"]


@functools.cache
def seen(digits_root, features=True):
    """The digits to train on, and those to validate on, as read from files."""
    data = images_in(digits_root, img_size=8, batch_size=2)
    data.setup()
    network = timm.create_model("test_resnet", num_classes=10)
    how = dict(data=data, device=torch.device("cpu"), pixels=True, features=features)
    return (
        extract(network, data.train_images.samples, **how),
        extract(network, data.val_images.samples, **how),
    )


def scores(sets, solved):
    """The baselines and their accuracies."""
    return [(row["name"], row["acc1"]) for row in baselines.scores(*sets, 10, solved)]


def test_the_regression_is_scikit_learns_on_the_digits_themselves(digits_root):
    """The oracle has the digits of the package; the baseline has read them from files, as RGB.

    Three channels alike share a weight among them, which a penalty of a third does too.
    """
    digits = load_digits()
    held_out = sorted(int(file.stem) for file in digits_root.glob("val/*/*.png"))
    kept = np.setdiff1d(np.arange(len(digits.target)), held_out)
    pixels = np.round(digits.data * (255 / 16)).astype(np.float32)
    oracle = make_pipeline(StandardScaler(), LogisticRegression(C=3, max_iter=1000))
    oracle.fit(pixels[kept], digits.target[kept])
    expected = 100 * oracle.score(pixels[held_out], digits.target[held_out])

    names, accuracies = zip(*scores(seen(digits_root), {}), strict=True)
    chance, regression, _ = accuracies
    assert [*names] == NAMES
    assert regression == pytest.approx(expected, abs=0.3)  # one image of 360
    assert chance == pytest.approx(100 / 10, abs=1)
    # a head that is solved is the linear probe
    solved = scores(seen(digits_root, features=False), {"acc1": 41.0})
    assert solved == [(NAMES[0], chance), (NAMES[2], 41.0), (NAMES[1], regression)]


def test_chance_goes_by_the_images_that_count(digits_root):
    train, val = seen(digits_root)
    few = val.at(val.labels == 7)  # a folder's largest class may have no image to validate on
    assert next(baselines.scores(train, few, 10, {}))["acc1"] == 100
    with pytest.raises(UserError, match="no validation image"):
        next(baselines.scores(train, val.at(val.labels < 0), 10, {}))


def test_the_mean_of_the_classes_is_scikit_learns():
    answers = np.array([0, 1, 1, 3, 0])
    labels = np.array([0, 1, 0, 0, 3])
    expected = 100 * balanced_accuracy_score(labels, answers)
    assert baselines.accuracies(answers, labels)["acc1_macro"] == expected


@pytest.mark.slow
def test_a_run_on_a_folder_has_them_in_its_file_and_its_summary(
    digits_root, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = Path("logs/own", baselines.FILE)
    # the regression beats it
    recipe = ["--trainer.max_epochs=2", "--model.fields.depth=1", "--model.lr=1e-5"]
    named = [f"--data.root={digits_root}", "--run_name=own", "--data.num_workers=0"]
    main(["fit", *named, *recipe, *DEVICES])
    first = json.loads(file.read_text())
    assert [row["name"] for row in first["baselines"]] == NAMES
    chance, regression, _ = first["baselines"]
    assert regression["acc1"] > 90 > 20 > chance["acc1"]

    file.write_text("stale")
    main(["resume", "own", "--trainer.max_epochs=3"])
    again = json.loads(file.read_text())
    assert again["run"] >= first["run"]  # the best so far
    assert again["baselines"][1]["acc1"] == regression["acc1"]
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    shown = f"{regression['acc1']:.2f} % on the pixels"
    for words in (shown, "points better than this run", "try published"):
        assert words in out or "screen" not in plugins.extras()

    for epochs, error, words in (
        (4, ValueError("no room\nfor this"), "no room"),
        (5, KeyboardInterrupt(), "Keyboard"),
    ):
        classify = Mock(side_effect=error)
        monkeypatch.setattr(baselines, "classify", classify)
        main(["resume", "own", f"--trainer.max_epochs={epochs}"])
        assert f"no baselines: {words}" in capsys.readouterr().out
        assert classify.call_count == 1
        assert not file.exists()


def table(tmp_path, run, best):
    """The table of a run beside chance and a regression."""
    rows = [
        {"name": "chance", "score": 10.0, "how": "so", "seconds": 1.0},
        {"name": "<regression>", "score": best, "how": "so", "seconds": 1.0},
    ]
    about = {"how": "its best.ckpt", "metric": "top-1", "run": run, "baselines": rows}
    (tmp_path / baselines.FILE).write_text(json.dumps(about))
    return plugins.results(tmp_path)[0]


def suggested(folder, **settings):
    """What the summary of a run says that one may try."""
    run: Any = SimpleNamespace(
        folder=folder, module=CaiTModule(**settings), program=SimpleNamespace(script=None)
    )
    return [line for _, line in baselines.Baselines(run).suggestions()]


def test_a_better_baseline_is_said_with_what_to_try(tmp_path):
    better = table(tmp_path, run=50.0, best=62.5)
    assert [row[0] for row in better.rows] == ["<regression>", "this run", "chance"]
    assert better.note == "<regression>: 12.50 points better than this run"
    assert better.head[-1] == "top-1"
    more = "more time: --minutes 10"
    assert suggested(tmp_path) == ["published weights: --from timm", more]
    assert suggested(tmp_path, pretrained=True) == [more]
    assert suggested(tmp_path, weights="my lite.pth") == [more]


# not better by what rounding makes of it
@pytest.mark.parametrize("run", [63.0, 62.5, float(torch.tensor(62.499))])
def test_a_baseline_that_is_no_better_asks_for_nothing(run, tmp_path):
    assert table(tmp_path, run, best=62.5).note == ""
    assert suggested(tmp_path) == []
