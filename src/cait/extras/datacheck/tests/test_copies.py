"""No image on both sides: files, bytes, and a folder that grows."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from cait.data.source import open_source

CLASSES = ["a", "b", "logs"]
Draw = random.Random
"""Generator of random numbers."""


def add_images(root, draw, first=0):
    """Add files of a few sizes to three classes; some are copies, links or hard links of files of any class."""
    ways = [shutil.copy, os.symlink, os.link]
    for label in CLASSES:
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + draw.randrange(8, 40)):
            others = sorted(root.glob("*/*"))
            path = root / label / f"{number:03}.png"
            if others and draw.random() < 0.2:
                draw.choice(ways)(draw.choice(others).resolve(), path)
            else:
                size = draw.choice([1, 2000])
                path.write_bytes(b"same" * size + draw.randbytes(9) + b"same" * 2000)


def content(images):
    return {path: Path(path).read_bytes() for path, _ in images}


@pytest.mark.parametrize("seed", range(8))
def test_no_image_is_on_both_sides_of_a_folder_that_grows(seed, tmp_path):
    draw = Draw(seed)
    root = tmp_path / "images"
    fraction = (0.1, 0.2, 0.3)[seed % 3]
    add_images(root, draw)
    files = {str(path): path.read_bytes() for path in root.glob("*/*")}
    source = open_source(str(root), val_fraction=fraction)
    train, val = content(source.train), content(source.val)
    assert not {*train.values()} & {*val.values()}
    left_out = files.keys() - train.keys() - val.keys()
    assert {files[path] for path in left_out} <= {*val.values()}
    # as many as ever, and every class on both sides
    images = Counter(Path(path).parent.name for path in files)
    for label, name in enumerate(CLASSES):
        assert source.val.labels.count(label) == max(1, round(images[name] * fraction))
        assert label in source.train.labels

    held_out = tmp_path / "held.csv"
    held_out.write_text("\n".join(["path", *(os.path.relpath(path, root) for path in val)]))
    add_images(root, draw, first=100)
    grown = open_source(str(root), val_list=str(held_out))
    assert content(grown.val) == val
    new = {path for path in root.glob("*/1??.png") if path.read_bytes() not in val.values()}
    assert {*map(str, new)} <= content(grown.train).keys()
    folds = [open_source(str(root), folds=3, fold=fold) for fold in range(3)]
    for divided in (grown, *folds):
        assert not {*content(divided.train).values()} & {*content(divided.val).values()}
