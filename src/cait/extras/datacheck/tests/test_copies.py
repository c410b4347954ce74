"""No image on both sides: files, bytes and links."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from cait.data.source import open_source

CLASSES = ["a", "b", "logs"]


def write_images(root, draw):
    """Files of a few sizes to three classes; some are copies, links or hard links of files of any class."""
    for label in CLASSES:
        (root / label).mkdir(parents=True)
        for number in range(draw.randrange(8, 40)):
            others = sorted(root.glob("*/*"))
            path = root / label / f"{number:03}.png"
            if others and draw.random() < 0.2:
                way = draw.choice([shutil.copy, os.symlink, os.link])
                way(draw.choice(others).resolve(), path)
            else:
                size = draw.choice([1, 2000])
                path.write_bytes(b"same" * size + draw.randbytes(9) + b"same" * 2000)


def content(images):
    return {path: Path(path).read_bytes() for path, _ in images}


def assert_apart(source):
    """No training image has the bytes of a validation image."""
    assert {*content(source.train).values()}.isdisjoint(content(source.val).values())


@pytest.mark.parametrize("seed", range(8))
def test_no_image_is_on_both_sides_whatever_is_a_copy_or_a_link(seed, tmp_path):
    draw = random.Random(seed)
    fraction = (0.1, 0.2, 0.3)[seed % 3]
    root = tmp_path / "images"
    write_images(root, draw)
    source = open_source(str(root), val_fraction=fraction)
    assert_apart(source)
    val = content(source.val)
    files = {str(path): path.read_bytes() for path in root.glob("*/*")}
    left_out = files.keys() - content(source.train).keys() - val.keys()
    assert {files[path] for path in left_out} <= {*val.values()}
    # as many as ever, and every class on both sides
    images = Counter(Path(path).parent.name for path in files)
    for label, name in enumerate(CLASSES):
        assert source.val.labels.count(label) == max(1, round(images[name] * fraction))
        assert label in source.train.labels

    for fold in range(3):
        assert_apart(open_source(str(root), folds=3, fold=fold))
