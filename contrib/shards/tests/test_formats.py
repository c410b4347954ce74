"""Whatever the images are and wherever the shards lie: the images of the folder, in its order, and its resume."""

import os

import loopback
import numpy as np
import pytest
import tifffile
from harness import NO_TEXT, save_classes
from PIL import Image
from same import same
from shard_sets import batches, make, module


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
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (root / place).mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 60000, (20, 24, channels), np.uint16)
            path = str(root / place / str(number))
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
    settings = {}
    if request.param == "files":
        write_files(folder / "images", photographs)
    elif request.param in PLANES:
        settings = write_planes(folder / "images", request.param)
    else:
        root = "own_pictures:OwnPictures"
    if "published" in request.param:
        settings = dict(exif_orientation=False, background=None)
    return root, make(root, folder / "shards", "--images=5"), settings


@pytest.mark.parametrize(("store", "workers"), [("folder", 0), ("bucket", 1)])
def test_shards_give_the_images_of_their_folder_in_its_order_and_its_resume(
    store, workers, packed, tmp_path, s3
):
    folder, shards, settings = packed
    root = f"{shards.parent}/./{shards.name}/"
    if store == "bucket":
        root = loopback.upload(shards, shards.parent.name)
    theirs = module(folder, **settings)
    ours = module(root, num_workers=workers, data_dir=str(tmp_path), **settings)
    assert ours.state_dict() == theirs.state_dict()  # all that a checkpoint compares
    assert same(batches(ours), batches(theirs))
    if not workers:
        unreadable = {path.replace(ours.source.root, folder) for path in ours.unreadable.seen}
        assert unreadable == {*theirs.unreadable.seen}


@pytest.mark.parametrize("change", ["--raw", "--max_side=8"])
@pytest.mark.parametrize("planes", PLANES)
def test_planes_are_never_cut_to_eight_bits(planes, change, tmp_path, capsys):
    write_planes(tmp_path / "images", planes)
    with pytest.raises(SystemExit):
        make(tmp_path / "images", tmp_path / "shards", change)
    assert "more than 8 bits a channel" in capsys.readouterr().err
