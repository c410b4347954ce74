"""The table of images: its columns, parts of it, and the lists of what validates."""

import numpy as np
import pytest

from cait.data.listing import below_root
from cait.data.table import TEST, TRAIN, VAL, Images, held_out_paths, rows_by_class, write_held_out

PATHS = ["b/1.png", "b/\udcff.png", "a/ö.png", "a/2.png"]


def table():
    labels = [1, 1, 0, 0]
    samples = [(f"root/{path}", label) for path, label in zip(PATHS, labels, strict=True)]
    images = Images(samples, "root/", ["a", "b"])
    images.splits[:] = [TRAIN, VAL, TEST, TRAIN]
    return images.grouped(["y", "x", "y", "z"])


def test_parts_of_a_table_have_the_columns_of_the_whole():
    images = table()
    assert images[1] == ("root/b/\udcff.png", 1)
    turned = images.select(np.array([3, 1, 0]))
    assert [*turned] == [images[3], images[1], images[0]]
    assert turned.labels.tolist() == [0, 1, 1]
    assert [turned.group(index) for index in range(3)] == ["z", "x", "y"]
    trained = turned.in_split(TRAIN)
    assert [*trained] == [images[3], images[0]]
    assert [*trained.select(np.array([1]))] == [images[0]]


def test_rows_of_a_class_are_together_the_class_of_the_first_row_first():
    rows = rows_by_class(np.array([5, 2, 5, 9, 2]))
    assert [list(row) for row in rows] == [[0, 2], [1, 4], [3]]


def test_a_list_of_what_validates_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "validation.csv"
    write_held_out(file, table(), "root", ["a", "b"])
    assert held_out_paths(file, "root") == PATHS
    lines = file.read_text(errors="surrogateescape").splitlines()
    assert lines[:2] == ["path,class", "b/1.png,b"]


@pytest.mark.parametrize(
    "path", ["a/1.png", "./a/1.png", "a/../a//1.png", "../photos/a/1.png", "{here}/photos/a/1.png"]
)
def test_a_path_is_below_the_root_however_it_is_written(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert below_root("photos", path.format(here=tmp_path)) == "a/1.png"
