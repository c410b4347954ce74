"""A table says labels and splits, however its paths are written and its file is saved."""

import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from class_folders import write_files
from harness import NO_TEXT, call, link_digits
from label_tables import below, write_table
from modules import images_in

from cait.data.source import open_source
from cait.extras.annotations.source import read_table

ROWS = [
    ("a.png", "odd", "train"),
    ("b.png", "even", "Test"),
    ("c.png", "even", "train"),
    ("d.png", "odd", "valid"),
    ("e.png", "even", "train"),
]


@pytest.mark.parametrize("form", ["{path}", "./x/../{path}", "{root}/{path}"])
def test_a_table_says_labels_and_splits_whatever_its_order_and_the_form_of_its_paths(
    form, tmp_path
):
    write_files(tmp_path, [path for path, _, _ in ROWS])
    rows = [(form.format(path=path, root=tmp_path), *cells) for path, *cells in reversed(ROWS)]
    labels = write_table(tmp_path / "t.csv", "path,label,split", rows)
    source = open_source(str(tmp_path), labels=labels)
    assert source.class_names == ["even", "odd"]
    assert below(source.train, tmp_path) == ["a.png", "c.png", "e.png"]
    assert source.train.labels.tolist() == [1, 0, 0]
    assert below(source.val, tmp_path) == ["d.png"]
    assert below(source.test, tmp_path) == ["b.png"]


def facts(root, rows):
    """What a checkpoint of a run with this table holds."""
    labels = write_table(root / "t.csv", "path,label,split", rows)
    return images_in(root, labels=labels).state_dict()


def test_a_run_depends_on_the_labels_and_not_on_the_order_of_the_table(tmp_path):
    write_files(tmp_path, [path for path, _, _ in ROWS])
    before = facts(tmp_path, ROWS)
    assert facts(tmp_path, ROWS[::-1]) == before
    changed = [*ROWS[:2], ("c.png", "odd", "train"), *ROWS[3:]]
    assert facts(tmp_path, changed) != before


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_may_have_other_separators(separator, tmp_path):
    write_files(tmp_path, ["1.png", "2.png"])
    text = 'path,label\n1.png,a\n2.png,"a;b"\n'.replace(",", separator)
    (tmp_path / "t.csv").write_text(text)
    for several, names in ((False, ["a", "a;b"]), (True, ["a", "b"])):
        source = open_source(str(tmp_path), labels=str(tmp_path / "t.csv"), multi_label=several)
        assert source.class_names == names


def test_names_composed_otherwise_are_found(tmp_path):
    """A table that was written on Linux, of files that a Mac has packed."""
    paths = ["cre\u0300me/e\u0301te\u0301.png", "cre\u0300me/2.png", "sucre/1.png", "sucre/2.png"]
    write_files(tmp_path, paths)
    labels = ["cre\u0300me", "cr\u00e8me", "sucre", "sucre"]
    composed = [unicodedata.normalize("NFC", path) for path in paths]
    table = write_table(tmp_path / "t.csv", "path,label", zip(composed, labels, strict=True))
    source = open_source(str(tmp_path), labels=table)
    assert source.class_names == ["cr\u00e8me", "sucre"]
    assert sorted(below(source.images, tmp_path)) == sorted(paths)


def test_a_table_may_name_files_that_are_no_text(tmp_path):
    names = [f"{os.fsdecode(NO_TEXT)}{number}.png" for number in range(4)]
    write_files(tmp_path, names)
    rows = "".join(f"{name},{label}\n" for name, label in zip(names, "abab", strict=True))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}", errors="surrogateescape")
    source = open_source(str(tmp_path), labels=str(tmp_path / "t.csv"))
    assert below(source.images, tmp_path) == names
    assert images_in(tmp_path, labels=str(tmp_path / "t.csv")).state_dict()


def test_what_predict_writes_is_a_table_of_labels(tmp_path, trained, digits_root, monkeypatch):
    """Whatever the images were called; with some beside the root, and one that could not be read."""
    link_digits(tmp_path, digits_root)
    shutil.copytree(trained, tmp_path / "logs/good")
    shutil.copytree(digits_root / "val/0", tmp_path / "new/zero")
    (tmp_path / "link").symlink_to(digits_root, target_is_directory=True)
    (tmp_path / "none.png").touch()
    beside = next((tmp_path / "new/zero").iterdir()).name
    images = [
        "data/digits/train/0/0000.png",
        "./data/../data/digits/train/1/0001.png",
        "link/train/2/0002.png",
        f"{digits_root}/train/3/0003.png",
        f"{tmp_path}/data/digits/train/4/0004.png",
        f"new/zero/{beside}",
    ]
    words = ["--format=csv", "--output=found.csv"]
    done = call(tmp_path, "predict", "good", *images, "none.png", *words)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    table = read_table(Path("found.csv"), Path("data/digits"), several=False)
    used = [os.path.realpath(path) for path, _ in table]
    assert sorted(used) == sorted(os.path.realpath(path) for path in images)
