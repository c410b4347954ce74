"""Whatever the images are and wherever the shards lie: the images of the folder, in its order, and its resume."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loopback
import numpy as np
import pytest
import tifffile
from harness import NO_TEXT, save_classes
from PIL import Image
from same import same
from shard_sets import batches, make, module

Settings = dict[str, Any]


@dataclass
class Packed:
    """A data set and its shards, and the settings of a run on it."""

    root: str
    shards: Path
    settings: Settings


def write_files(root, photographs):
    """Images of every mode, two files that are none, and a name that is no text."""
    save_classes(photographs, root, 12, 5)
    (root / "train/cat/0.jpg").write_bytes(b"<html>")
    (root / "val/owl/5.JPEG").write_bytes(b"")
    odd = os.fsencode(root / "train/dog") + b"/" + NO_TEXT + b".png"
    (root / "train/dog/2.png").rename(os.fsdecode(odd))


PLANES = {"array": 3, "gray": 1, "color": 3, "bands": 6}
"""Channels of 16 bits."""


def write_planes(root, kind):
    draw = np.random.default_rng(0)
    channels = PLANES[kind]
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 60000, (20, 24, channels), np.uint16)
            path = str(root / name / str(number))
            if kind == "array":
                np.save(path, pixels)
            elif kind == "gray":
                Image.fromarray(pixels[..., 0]).save(f"{path}.png")
            else:
                style = "rgb" if kind == "color" else "minisblack"
                tifffile.imwrite(f"{path}.tif", pixels, photometric=style, planarconfig="contig")
    half = [0.5] * channels
    reader = "cait.extras.channels.planes:read"
    return dict(reader=reader, in_chans=channels, mean=half, std=half, auto_augment=None)


@pytest.fixture(scope="module", params=["files", *PLANES, "in memory", "in memory, published"])
def packed(request, tmp_path_factory, photographs):
    folder = tmp_path_factory.mktemp("formats")
    root = str(folder / "images")
    settings: Settings = {}
    if request.param == "files":
        write_files(folder / "images", photographs)
    elif request.param in PLANES:
        settings = write_planes(folder / "images", request.param)
    else:
        root = "own_pictures:OwnPictures"
        if "published" in request.param:
            settings = dict(exif_orientation=False, background=None)
    return Packed(root, make(root, folder / "shards", "--images=5"), settings)


@pytest.mark.parametrize(("store", "workers"), [("folder", 0), ("bucket", 1)])
def test_shards_give_the_images_of_their_folder_in_its_order_and_its_resume(
    store, workers, packed, tmp_path, s3
):
    root = f"{packed.shards.parent}/./{packed.shards.name}/"
    if store == "bucket":
        root = loopback.upload(packed.shards, packed.shards.parent.name)
    theirs = module(packed.root, **packed.settings)
    ours = module(root, num_workers=workers, data_dir=str(tmp_path), **packed.settings)
    assert ours.state_dict() == theirs.state_dict()  # all that a checkpoint compares
    assert same(batches(ours), batches(theirs))
    for packed_images, images in (
        (ours.source.train, theirs.source.train),
        (ours.source.val, theirs.source.val),
    ):
        for index in range(len(images)):
            file, _ = images[index]
            if isinstance(file, str):
                content, _ = packed_images[index]
                assert content.getvalue() == Path(file).read_bytes()
    if not workers:
        unreadable = {path.removeprefix(ours.source.root) for path in ours.unreadable.seen}
        assert unreadable == {path.removeprefix(packed.root) for path in theirs.unreadable.seen}


@pytest.mark.parametrize("change", ["--raw", "--max_side=8"])
@pytest.mark.parametrize("planes", PLANES)
def test_planes_are_never_cut_to_eight_bits(planes, change, tmp_path, capsys):
    write_planes(tmp_path / "images", planes)
    with pytest.raises(SystemExit):
        make(tmp_path / "images", tmp_path / "shards", change)
    assert "more than 8 bits a channel" in capsys.readouterr().err
