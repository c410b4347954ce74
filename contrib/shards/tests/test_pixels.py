"""Shards of smaller images and of raw pixels: Pillow's pixels, from a disk and from S3, and never by mistake."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from encoded_image import encoded
from harness import over_table
from PIL import ExifTags, Image
from same import same
from shard_sets import batches, make, module

from cait.data.reading import orientation
from cait.data.source import open_source
from cait.errors import UserError

SIDE = 40
XMP = b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>'
LANCZOS = Image.Resampling.LANCZOS


def oriented(orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.fixture
def root(tmp_path, photographs):
    """Images of 60 × 48 of many kinds, a small one, and a file that is none."""
    photo = photographs[0].resize((60, 48))
    clear = photo.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    deep = Image.fromarray(np.arange(60 * 48, dtype=np.uint16).reshape(48, 60) * 20)
    files = {
        "clear.png": encoded(clear, "PNG"),
        "deep.png": encoded(deep, "PNG"),
        "gray.jpg": encoded(photo.convert("L"), quality=95),
        "none.jpg": b"<html>",
        "opaque.png": encoded(photo.convert("RGBA"), "PNG"),
        "photo.jpg": encoded(photo, quality=95),
        "small.jpg": encoded(photo.resize((SIDE, 31))),
        "turned.jpg": encoded(photo, quality=95, exif=oriented(6)),
        "upright.jpg": encoded(photo, quality=95, exif=oriented(1), xmp=XMP),
        "xmp.jpg": encoded(photo, quality=95, xmp=XMP),
    }
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / "images" / folder / name).write_bytes(content)
    return tmp_path / "images"


def opened(content):
    return Image.open(BytesIO(content))


def stored(shards, split="train"):
    """What shards hold in the place of each file."""
    samples = getattr(open_source(str(shards)), split)
    return {
        Path(samples.name(index)).name: samples[index][0].read() for index in range(len(samples))
    }


def test_large_images_are_made_smaller_and_nothing_else_is(root, tmp_path):
    shards = make(root, tmp_path / "shards", f"--max_side={SIDE}")
    before = {path.name: path.read_bytes() for path in (root / "train/a").iterdir()}
    after = stored(shards)
    assert stored(shards, "val") == before
    for name in ("none.jpg", "small.jpg"):
        assert after[name] == before[name]
    for name in ("gray.jpg", "opaque.png", "photo.jpg", "turned.jpg", "upright.jpg", "xmp.jpg"):
        smaller = opened(after[name])
        assert smaller.format == "JPEG"
        assert orientation(smaller) == orientation(opened(before[name]))
        expected = opened(before[name]).convert(smaller.mode).resize((40, 32), LANCZOS)
        assert abs(np.asarray(smaller) - np.asarray(expected, float)).mean() < 4
    expected = opened(before["clear.png"]).resize((40, 32), LANCZOS)
    np.testing.assert_array_equal(opened(after["clear.png"]), expected)
    assert np.asarray(opened(after["deep.png"])).max() > 200  # scaled from 16 bits, not cut off


@over_table(__file__, "readings")
def test_raw_pixels_are_those_that_a_run_on_the_folder_reads(options, reading, root, tmp_path):
    shards = make(root, tmp_path / "raw", "--raw", *options)
    after = stored(shards)
    assert after["none.jpg"] == b"<html>"
    assert after["photo.jpg"].startswith(b"P6\n60 48\n255\n")
    for settings in ({}, dict(repeats=3), dict(repeats=3, backend="timm")):
        ours, theirs = (module(path, **reading, **settings) for path in (shards, root))
        assert same(batches(ours), batches(theirs))
    with pytest.raises(UserError, match=r"give --data\.exif_orientation"):
        module(shards, exif_orientation=bool(reading))


def test_raw_pixels_of_smaller_images_are_pillows(root, tmp_path):
    shards = make(root, tmp_path / "raw", "--raw", f"--max_side={SIDE}")
    expected = Image.open(root / "train/a/photo.jpg").resize((40, 32), LANCZOS)
    np.testing.assert_array_equal(opened(stored(shards)["photo.jpg"]), expected)


def test_other_pixels_are_other_data_for_a_resume(root, tmp_path):
    shards = make(root, tmp_path / "shards", f"--max_side={SIDE}")
    assert module(shards).state_dict() != module(root).state_dict()
