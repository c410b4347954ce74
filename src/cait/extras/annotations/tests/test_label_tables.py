"""A table says labels and splits, however its paths are written and its file is saved."""

import os
import shutil
from pathlib import Path

import pytest
from class_folders import write_files
from harness import NO_TEXT, call, link_digits, works
from label_tables import names, write_table
from modules import images_in

from cait.data.source import open_source
from cait.extras.annotations.source import read_table

PATHS = ["a.png", "b.png", "c.png", "d.png", "e.png"]
LABELS = ["odd", "even", "even", "odd", "even"]
SPLITS = ["train", "Test", "train", "valid", "train"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(Path(), PATHS)


@pytest.mark.parametrize("form", ["{path}", "./x/../{path}", "{here}/{path}"])
def test_a_table_says_labels_and_splits_whatever_its_order_and_the_form_of_its_paths(form):
    paths = [form.format(path=path, here=Path.cwd()) for path in PATHS]
    write_table("t.csv", "path,label,split", paths[::-1], LABELS[::-1], SPLITS[::-1])
    source = open_source(".", labels="t.csv")
    assert source.class_names == ["even", "odd"]
    assert names(source.train) == ["a.png", "c.png", "e.png"]
    assert source.train.labels.tolist() == [1, 0, 0]
    assert names(source.val) == ["d.png"]
    assert names(source.test) == ["b.png"]


def facts(paths, labels):
    """What a checkpoint of a run with this table holds."""
    write_table("t.csv", "path,label", paths, labels)
    return images_in(".", labels="t.csv").state_dict()


def test_a_run_depends_on_the_labels_and_not_on_the_order_of_the_table():
    before = facts(PATHS, LABELS)
    assert facts(PATHS[::-1], LABELS[::-1]) == before
    assert facts(PATHS, LABELS[1:] + LABELS[:1]) != before


def test_a_table_may_name_files_that_are_no_text():
    paths = [f"{os.fsdecode(NO_TEXT)}{number}.png" for number in range(4)]
    write_files(Path(), paths)
    assert facts(paths, "abab")
    assert names(open_source(".", labels="t.csv").images) == paths


def test_what_predict_writes_is_a_table_of_labels(tmp_path, trained, digits_root):
    """Whatever the images were called; with some beside the root, and one that could not be read."""
    link_digits(tmp_path, digits_root)
    shutil.copytree(trained, "logs/good")
    shutil.copytree(digits_root / "val/0", "new")
    Path("link").symlink_to(digits_root, target_is_directory=True)
    beside = next(Path("new").iterdir())
    images = [
        "data/digits/train/0/0000.png",
        "./data/../data/digits/train/1/0001.png",
        "link/train/2/0002.png",
        f"{digits_root}/train/3/0003.png",
        f"{tmp_path}/data/digits/train/4/0004.png",
        str(beside),
    ]
    works(call(tmp_path, "predict", "good", *images, "a.png", "--format=csv", "--output=found.csv"))
    table = read_table(Path("found.csv"), Path("data/digits"), several=False)
    used = sorted(os.path.realpath(path) for path, _ in table)
    assert used == sorted(map(os.path.realpath, images))
