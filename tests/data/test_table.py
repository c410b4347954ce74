"""The table of images: its columns, parts of it, and the lists of what validates."""

from pathlib import Path

import numpy as np
import pytest
from class_folders import fill

from cait.data.listing import below_root
from cait.data.source import open_source
from cait.data.table import TEST, TRAIN, VAL, Images, held_out_paths, rows_by_class, write_held_out


def table() -> Images:
    paths = ["b/1.png", "b/\udcff.png", "a/ö.png", "a/2.png"]
    images = Images(
        zip((f"root/{path}" for path in paths), [1, 1, 0, 0], strict=True), "root/", ["a", "b"]
    )
    images.splits[:] = [TRAIN, VAL, TEST, TRAIN]
    return images.grouped(["y", "x", "y", "z"])


def test_parts_of_a_table_have_the_columns_of_the_whole() -> None:
    images = table()
    assert [*images] == [
        ("root/b/1.png", 1),
        ("root/b/\udcff.png", 1),
        ("root/a/ö.png", 0),
        ("root/a/2.png", 0),
    ]
    turned = images.select(np.array([3, 1, 0]))
    assert [*turned] == [images[3], images[1], images[0]]
    assert turned.labels.tolist() == [0, 1, 1]
    assert [turned.group(index) for index in range(3)] == ["z", "x", "y"]
    assert [*turned.in_split(TRAIN)] == [images[3], images[0]]
    assert [*turned.select(turned.splits == TRAIN).select(np.array([1]))] == [images[0]]
    assert [rows.tolist() for rows in rows_by_class(np.array([5, 2, 5, 9, 2]))] == [
        [0, 2],
        [1, 4],
        [3],
    ]


def test_a_list_of_what_validates_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_held_out(tmp_path / "validation.csv", table(), "root", ["a", "b"])
    assert held_out_paths(tmp_path / "validation.csv", "root") == [
        "b/1.png",
        "b/\udcff.png",
        "a/ö.png",
        "a/2.png",
    ]
    assert (tmp_path / "validation.csv").read_text(errors="surrogateescape").splitlines()[:2] == [
        "path,class",
        "b/1.png,b",
    ]


@pytest.mark.parametrize(
    "path", ["a/1.png", "./a/1.png", "a/../a//1.png", "../photos/a/1.png", None]
)
def test_a_path_is_below_the_root_however_it_is_written(path: str | None, here: Path) -> None:
    assert below_root("photos", path or str(Path("photos/a/1.png").absolute())) == "a/1.png"


def test_a_run_that_goes_on_keeps_what_it_has_held_out(tmp_path: Path) -> None:
    """The list decides, and nothing is divided again."""
    root = fill(tmp_path / "photos", {"a": 20, "b": 10})
    first = open_source(str(root))
    write_held_out(tmp_path / "validation.csv", first.val, root, first.class_names)
    again = open_source(str(root), val_fraction=0.5)
    again.choose = None  # type: ignore[attr-defined, method-assign]
    again.keep(tmp_path / "validation.csv")  # type: ignore[attr-defined]
    assert ([*again.train], [*again.val]) == ([*first.train], [*first.val])
