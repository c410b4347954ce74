"""The baselines beside a run: their figures against scikit-learn's own, and where they are shown."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from harness import DEVICES, over_table
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


@pytest.fixture(scope="module")
def seen(digits_root):
    """The digits to train on, and those to validate on, as read from files."""
    data = images_in(digits_root, img_size=8, batch_size=2)
    data.setup()
    network = timm.create_model("test_resnet", num_classes=10)
    device = torch.device("cpu")
    sets = (data.train_images.samples, data.val_images.samples)
    return [extract(network, samples, data, device, pixels=True) for samples in sets]


def test_the_regression_is_scikit_learns_on_the_digits_themselves(digits_root, seen):
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

    chance, regression, probe = baselines.scores(*seen, 10, {})
    assert [row["name"] for row in (chance, regression, probe)] == NAMES
    assert regression["acc1"] == pytest.approx(expected, abs=0.3)  # one image of 360
    assert chance["acc1"] == pytest.approx(100 / 10, abs=1)


def test_a_head_that_is_solved_is_the_linear_probe(seen):
    train, val = (images._replace(features=np.empty(0)) for images in seen)
    _, probe, _ = baselines.scores(train, val, 10, {"acc1": 41.0})
    assert (probe["name"], probe["acc1"]) == ("linear probe", 41.0)


def test_chance_goes_by_the_images_that_count(seen):
    train, val = seen
    few = val.at(val.labels == 7)  # a folder's largest class may have no image to validate on
    assert next(baselines.scores(train, few, 10, {}))["acc1"] == 100
    with pytest.raises(UserError, match="no validation image"):
        next(baselines.scores(train, val.at(val.labels < 0), 10, {}))


def test_the_mean_of_the_classes_is_scikit_learns():
    answers = np.array([0, 1, 1, 3, 0])
    labels = np.array([0, 1, 0, 0, 3])
    expected = 100 * balanced_accuracy_score(labels, answers)
    assert baselines.accuracies(answers, labels)["acc1_macro"] == expected


RECIPE = """
    --run_name=own --data.num_workers=0 --trainer.max_epochs=2 --model.fields.depth=1 --model.lr=1e-5
"""
"""The regression beats it."""


@pytest.mark.slow
def test_a_run_on_a_folder_has_them_in_its_file_and_its_summary(
    digits_root, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = Path("logs/own", baselines.FILE)
    main(["fit", f"--data.root={digits_root}", *RECIPE.split(), *DEVICES])
    first = json.loads(file.read_text())
    chance, regression, probe = first["baselines"]
    assert [row["name"] for row in (chance, regression, probe)] == NAMES
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
        monkeypatch.setattr(baselines, "classify", Mock(side_effect=error))
        main(["resume", "own", f"--trainer.max_epochs={epochs}"])
        assert f"no baselines: {words}" in capsys.readouterr().out
        assert not file.exists()


@over_table(__file__, "tries")
def test_a_better_baseline_is_said_with_what_to_try(score, settings, tries, tmp_path):
    row = {"how": "so", "seconds": 1.0}
    rows = [row | {"name": "chance", "score": 10.0}, row | {"name": "<regression>", "score": 62.5}]
    about = {"how": "its best.ckpt", "metric": "top-1", "run": score, "baselines": rows}
    (tmp_path / baselines.FILE).write_text(json.dumps(about))
    [shown] = plugins.results(tmp_path)
    assert shown.rows[0][0] == ("<regression>" if score < 62.5 else "this run")
    better = "<regression>: 12.50 points better than this run"
    assert shown.note == (better if tries else "")
    module = CaiTModule(**settings)
    run = SimpleNamespace(folder=tmp_path, module=module, program=SimpleNamespace(script=None))
    assert [line for _, line in baselines.Baselines(run).suggestions()] == tries
