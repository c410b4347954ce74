"""Where images come from besides class folders: ImageNet's archives, torchvision's and Hugging Face's sets."""

from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
from modules import images_in
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
def archives(tmp_path, monkeypatch, photographs):
    root = tmp_path / "imagenet"
    return root, formats.write_imagenet(root, monkeypatch, photographs)


def test_imagenets_archives_are_unpacked_once_and_read_as_folders(archives):
    root, val = archives
    assert module(root).num_classes == 3  # before `setup`, because the model is built first
    data = set_up(root)
    assert data.class_names == list(formats.WNIDS)
    assert len(data.train_images) == 18
    assert {
        str(path.relative_to(root / "val")): path.read_bytes() for path in root.glob("val/*/*")
    } == val
    theirs = datasets.ImageNet(root, "val")
    assert [*data.val_images.samples] == theirs.samples
    assert [label for _, label in theirs.samples] == [0, 0, 1, 1, 2, 2]
    for archive in root.glob("ILSVRC2012_*"):
        archive.unlink()
    assert set_up(root).state_dict() == data.state_dict()


@pytest.mark.parametrize("part", ["train", "devkit"])
def test_archives_that_cannot_be_unpacked_leave_nothing(part, archives):
    root, _ = archives
    archive = root / ARCHIVE_META[part][0]
    if part == "train":
        archive.write_bytes(archive.read_bytes()[:-2000])
    else:
        archive.unlink()
    with pytest.raises(UserError, match=f"cannot unpack .*{archive.name}") as caught:
        set_up(root)
    assert "\n" not in str(caught.value)
    assert not (root / ".unpacking").exists()
    assert not (root / "train").exists()


# Data sets by name


@pytest.mark.parametrize(
    ("name", "write", "train_split", "train", "classes"),
    [
        ("cifar10", formats.write_cifar10, "train", 40, 10),
        ("flowers102", formats.write_flowers, "train+val", 12, 102),
    ],
)
def test_torchvisions_sets_are_read_by_name(
    name, write, train_split, train, classes, tmp_path, monkeypatch, photographs
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / name, monkeypatch, photographs)
    data = set_up(f"torch/{name}", train_split=train_split, val_split="test")
    assert data.num_classes == classes
    assert len(data.train_images) == train
    assert len(data.val_images) == 6
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert ((labels >= 0) & (labels < classes)).all()
    if name == "cifar10":
        assert data.class_names == [f"class {number}" for number in range(10)]
        for index, pixels in enumerate(formats.pixels(6, 0).transpose(0, 2, 3, 1)):
            image, label = data.val_images.samples[index]
            assert np.array_equal(np.asarray(image), pixels)
            assert label == index


def test_a_set_that_is_gone_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"torch/stanford_cars .* cannot be downloaded"):
        set_up("torch/stanford_cars", val_split="test", download=True)


def test_hugging_faces_sets_are_read_by_name(tmp_path, monkeypatch, photographs):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    crops = [
        photographs[number % 2].crop((number, number, number + 60, number + 40))
        for number in range(8)
    ]
    for split, count in (("train", 8), ("test", 4)):
        for number, crop in enumerate(crops[:count]):
            folder = Path("sets/pets", split, ("cat", "dog")[number % 2])
            folder.mkdir(parents=True, exist_ok=True)
            crop.save(folder / f"{number}.png")
    settings: dict = dict(val_split="test", data_dir=str(tmp_path / "cache"))
    data = set_up("hfds/sets/pets", **settings)
    assert data.class_names == ["cat", "dog"]
    assert len(data.train_images) == 8
    samples = data.val_images.samples
    found = {
        load_image(source).tobytes(): label for source, label in map(samples.__getitem__, range(4))
    }
    assert found == {crop.tobytes(): number % 2 for number, crop in enumerate(crops[:4])}
    for wrong in (dict(val_split="validation"), dict(input_key="img"), dict(target_key="labels")):
        with pytest.raises(UserError, match="hfds/sets/pets"):
            set_up("hfds/sets/pets", **settings | wrong)
