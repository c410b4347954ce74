"""Where images come from besides class folders: ImageNet's archives, torchvision's and Hugging Face's sets."""

from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
from harness import over_table
from modules import images_in
from PIL import Image
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META

from cait.data.reading import load_image
from cait.errors import UserError

module = partial(images_in, repeats=1)


def set_up(*first, **settings):
    data = module(*first, **settings)
    data.setup("fit")
    return data


# The archives of ImageNet


@pytest.fixture
def root(tmp_path, monkeypatch, photographs):
    root = tmp_path / "imagenet"
    formats.write_imagenet(root, monkeypatch, photographs)
    return root


def test_imagenets_archives_are_unpacked_once_and_read_as_folders(root):
    assert module(root).num_classes == 3  # before `setup`, because the model is built first
    data = set_up(root)
    assert data.class_names == formats.WNIDS
    assert len(data.train_images) == 18
    samples = sorted(data.val_images.samples, key=lambda sample: Path(sample[0]).name)
    assert [label for _, label in samples] == [2, 0, 1, 1, 0, 2]  # of the devkit's list
    assert [*data.val_images.samples] == datasets.ImageNet(root, "val").samples
    for archive in root.glob("ILSVRC2012_*"):
        archive.unlink()
    assert set_up(root).state_dict() == data.state_dict()


@pytest.mark.parametrize("part", ["train", "devkit"])
def test_archives_that_cannot_be_unpacked_leave_nothing(part, root):
    archive = root / ARCHIVE_META[part][0]
    if part == "train":
        archive.write_bytes(archive.read_bytes()[:-2000])
    else:
        archive.unlink()
    with pytest.raises(UserError, match=f"^cannot unpack .*{archive.name}.*$"):
        set_up(root)
    assert not [*root.glob("*/")]


# Data sets by name


@over_table(__file__, "sets")
def test_torchvisions_sets_are_read_by_name(
    name, write, train_split, train, classes, tmp_path, monkeypatch, photographs
):
    monkeypatch.chdir(tmp_path)
    getattr(formats, write)(tmp_path / "data" / name, monkeypatch, photographs)
    data = set_up(f"torch/{name}", train_split=train_split, val_split="test")
    assert data.num_classes == classes
    assert len(data.train_images) == train
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert ((labels >= 0) & (labels < classes)).all()
    if name == "cifar10":
        assert data.class_names[9] == "class 9"
        read, labels = zip(*data.val_images.samples, strict=True)
        np.testing.assert_array_equal(np.stack(read), formats.pixels(6, 0).transpose(0, 2, 3, 1))
        assert labels == (0, 1, 2, 3, 4, 5)


def test_hugging_faces_sets_are_read_by_name(tmp_path, monkeypatch, photographs):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        formats.save(photographs, tmp_path / "sets/pets" / place / "1.jpg", len(place))
        formats.save(photographs, tmp_path / "sets/pets" / place / "2.jpg", len(place) + 9)
    set_up_pets = partial(set_up, "hfds/sets/pets", data_dir=str(tmp_path / "cache"))
    data = set_up_pets(val_split="test")
    assert data.class_names == ["cat", "dog"]
    assert len(data.train_images) == 4
    samples = data.val_images.samples
    assert [samples[index][1] for index in range(4)] == [0, 0, 1, 1]
    last = load_image(samples[3][0])
    assert last.tobytes() == Image.open("sets/pets/test/dog/2.jpg").tobytes()
    for wrong in (dict(val_split="validation"), dict(input_key="img"), dict(target_key="labels")):
        with pytest.raises(UserError, match="hfds/sets/pets"):
            set_up_pets(**{"val_split": "test"} | wrong)
