"""Runs on tables: scored as scikit-learn scores, on what they have held out, on test images and on other tables."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import SMALL, call, ended, link_digits
from label_tables import write_table
from sklearn.metrics import average_precision_score, f1_score

import cait
from cait.data.source import open_source


def evaluation(run, *words):
    """What `cait eval` writes of a run."""
    folder = run.parents[1]
    done = call(folder, "eval", run.name, "--output=scores.json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "scores.json").read_text())


@pytest.fixture
def run(tmp_path, trained, digits_root):
    """A run of class folders, in a folder that has the digits."""
    link_digits(tmp_path, digits_root)
    return Path(shutil.copytree(trained, tmp_path / "logs/run"))


def test_a_run_of_two_folders_is_scored_on_a_whole_table(run, digits_root):
    rows = [(str(path), path.parent.name) for path in digits_root.glob("val/*/*.png")][::10]
    write_table(run.parents[1] / "t.csv", "path,label", rows)
    assert evaluation(run, "--data.labels=t.csv")["raw"]["images"] == len(rows)


def test_images_that_cannot_be_read_are_not_scored(run, digits_root):
    folder = run.parents[1]
    shutil.copytree(digits_root, folder / "photos")
    first = next((folder / "photos/val/0").iterdir())
    first.write_bytes(b"")
    done = call(folder, "eval", "run", "--data.root=photos", "--data.max_bad_share=0.5")
    assert done.returncode == 0
    assert "1 of 360 images cannot be read" in done.stderr
    scores = json.loads((run / "evaluation.json").read_text())
    assert scores["raw"]["images"] == 359


def test_a_folder_of_three_splits_is_scored_as_three(run, digits_root):
    three = run.parents[1] / "three"
    (three / "test").mkdir(parents=True)
    for split in ("train", "val"):
        (three / split).symlink_to(digits_root / split)
    for digit in range(10):
        (three / "test" / str(digit)).symlink_to(digits_root / "train" / str(digit))
    scores = evaluation(run, "--data.root=three")["raw"]
    assert scores["images"] == 360
    assert scores["extra"]["test"]["images"] == 1437
    (three / "test/unlabeled").mkdir()  # as Kaggle's folders of images without labels
    assert "extra" not in evaluation(run, "--data.root=three")["raw"]


# Several labels

SETTINGS = [
    *SMALL,
    "--trainer.devices=1",  # the tests' own process could not start others
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--data.num_workers=0",
    "--data.labels=labels.csv",
    "--data.multi_label=true",
    "--ema.decay=0.9",
]


@pytest.fixture(scope="module")
def several(place, digits_root):
    """A run whose images have one or two of the classes even, odd and three.

    Every fifth is a test image, every fourth of the others validates.
    """
    rows = []
    for number, path in enumerate(sorted(digits_root.glob("*/*/*.png"))):
        digit = int(path.parent.name)
        names = ["odd" if digit % 2 else "even"] + ["three"] * (digit % 3 == 0)
        split = "Test" if number % 5 == 0 else "valid" if number % 4 == 0 else "train"
        rows.append((str(path.relative_to(digits_root)), ";".join(names), split))
    write_table(place / "labels.csv", "path,label,split", rows)
    return ended(place, "several", SETTINGS)


def test_its_scores_are_scikit_learns_and_predict_says_the_same(several, monkeypatch):
    monkeypatch.chdir(several.parents[1])
    source = open_source("data/digits", labels="labels.csv", multi_label=True)
    scores = evaluation(several)["ema"]
    assert scores["images"] == len(source.val)
    assert scores["extra"]["test"]["images"] == len(source.test)
    paths = [path for path, _ in source.val]
    network = cait.load(several)
    images = torch.stack([network.transform(path) for path in paths])
    with torch.no_grad():
        probabilities = network(images).sigmoid().numpy()
    truth = source.label_sets.numpy()[source.val.labels]
    hits = probabilities > 0.5
    precision = average_precision_score(truth, probabilities)
    assert scores["mAP"] == pytest.approx(precision, abs=1e-4)
    f1 = f1_score(truth, hits, average="macro", zero_division=0)
    assert scores["f1"] == pytest.approx(f1, abs=5e-3)
    done = call(several.parents[1], "predict", "several", *paths[:20], "--format=csv")
    classes = [row["class"] for row in csv.DictReader(done.stdout.splitlines())]
    names = np.array(source.class_names)
    assert [{*name.split(";")} - {""} for name in classes] == [{*names[hit]} for hit in hits[:20]]


@pytest.mark.parametrize("split", ["train", "Test"])
def test_a_table_of_other_images_than_were_held_out_is_scored_whole(several, split):
    folder = several.parents[1]
    head, *lines = (folder / "labels.csv").read_text().splitlines()
    others = [line for line in lines if line.endswith(split)][::30]
    (folder / "other.csv").write_text("\n".join([head, *others]))
    scores = evaluation(several, "--data.labels=other.csv")
    assert scores["raw"]["images"] == len(others)


def test_a_table_that_lacks_an_image_that_was_held_out_is_refused(several):
    """The others of the table have trained."""
    folder = several.parents[1]
    lines = (folder / "labels.csv").read_text().splitlines()
    held_out = next(line for line in lines if line.endswith("valid"))
    lines.remove(held_out)
    (folder / "other.csv").write_text("\n".join(lines))
    done = call(folder, "eval", "several", "--data.labels=other.csv")
    assert done.returncode == 2
    assert held_out.split(",")[0] in done.stderr
