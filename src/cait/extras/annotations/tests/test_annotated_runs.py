"""Runs on tables: scored on what they have held out, on test images and on other tables."""

import shutil
from pathlib import Path

import pytest
from harness import SMALL, call, ended, link_digits, parsed, rows, works
from label_tables import write_table

from cait.data.source import open_source


def scores(run, *words):
    """What `cait eval` writes of a run."""
    folder = run.parents[1]
    works(call(folder, "eval", run.name, "--output=scores.json", *words))
    return parsed(folder / "scores.json")


@pytest.fixture
def run(tmp_path, trained, digits_root):
    """A run of class folders, in a folder that has the digits."""
    link_digits(tmp_path, digits_root)
    return Path(shutil.copytree(trained, tmp_path / "logs/run"))


def test_a_run_of_two_folders_is_scored_on_a_whole_table(run, digits_root):
    paths = [*digits_root.glob("val/*/*.png")][::10]
    table = run.parents[1] / "t.csv"
    write_table(table, "path,label", paths, [path.parent.name for path in paths])
    assert scores(run, "--data.labels=t.csv")["raw"]["images"] == len(paths)


def test_a_folder_of_three_splits_is_scored_as_three(run, digits_root):
    three = run.parents[1] / "three"
    shutil.copytree(digits_root / "val", three / "test")
    next((three / "test/3").iterdir()).unlink()
    for split in ("train", "val"):
        (three / split).symlink_to(digits_root / split)
    raw = scores(run, "--data.root=three")["raw"]
    assert raw["images"] == 360
    assert raw["extra"]["test"]["images"] == 359
    (three / "test/unlabeled").mkdir()  # as Kaggle's folders of images without labels
    assert "extra" not in scores(run, "--data.root=three")["raw"]


# Several labels

SETTINGS = """
    --trainer.devices=1 --trainer.max_epochs=1 --trainer.limit_train_batches=2 --data.num_workers=0 --ema.decay=0.9
    --data.labels=labels.csv --data.multi_label=true
"""
OF_DIGITS = """
    even;three odd even odd;three even odd even;three odd even odd;three
"""


@pytest.fixture(scope="module")
def several(place, digits_root):
    """A run whose images have one or two of the classes even, odd and three.

    Every fifth is a test image, every fourth of the others validates.
    """
    paths = sorted(digits_root.glob("*/*/*.png"))
    of_digits = OF_DIGITS.split()
    labels = [of_digits[int(path.parent.name)] for path in paths]
    splits = ["train"] * len(paths)
    splits[::4] = ["valid"] * len(splits[::4])
    splits[::5] = ["Test"] * len(splits[::5])
    write_table(place / "labels.csv", "path,label,split", paths, labels, splits)
    return ended(place, "several", [*SMALL, *SETTINGS.split()])


def test_the_test_images_are_scored_apart(several, monkeypatch):
    monkeypatch.chdir(several.parents[1])
    source = open_source("data/digits", labels="labels.csv", multi_label=True)
    evaluation = scores(several)["ema"]
    assert evaluation["images"] == len(source.val)
    assert evaluation["extra"]["test"]["images"] == len(source.test)
    best = max(float(row["val_ema/mAP"] or 0) for row in rows(several))
    assert evaluation["mAP"] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("split", ["train", "Test"])
def test_a_table_of_other_images_than_were_held_out_is_scored_whole(several, split):
    folder = several.parents[1]
    head, *lines = (folder / "labels.csv").read_text().splitlines()
    others = [line for line in lines if line.endswith(split)][::30]
    (folder / "other.csv").write_text("\n".join([head, *others]))
    assert scores(several, "--data.labels=other.csv")["raw"]["images"] == len(others)


def test_a_table_that_lacks_an_image_that_was_held_out_is_refused(several):
    """The others of the table have trained."""
    folder = several.parents[1]
    lines = (folder / "labels.csv").read_text().splitlines()
    held_out = next(line for line in lines if line.endswith("valid"))
    lines.remove(held_out)
    (folder / "other.csv").write_text("\n".join(lines))
    done = call(folder, "eval", "several", "--data.labels=other.csv")
    assert done.returncode == 2
    assert Path(held_out.split(",")[0]).name in done.stderr
