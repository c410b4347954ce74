"""The table of images: its columns, parts of it, and the lists of what validates."""

import numpy as np

from cait.data.table import TEST, TRAIN, VAL, Images, held_out_paths, write_held_out

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


def test_a_list_of_what_validates_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "validation.csv"
    write_held_out(file, table(), "root", ["a", "b"])
    assert held_out_paths(file, "root") == PATHS
    lines = file.read_text(errors="surrogateescape").splitlines()
    assert lines[:2] == ["path,class", "b/1.png,b"]
