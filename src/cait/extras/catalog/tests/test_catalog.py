"""Where images come from besides class folders: ImageNet's archives, torchvision's and Hugging Face's sets."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
from modules import images_in
from PIL import Image
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META

from cait.data.reading import load_image
from cait.errors import UserError

module = partial(images_in, repeats=1)


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


# The archives of ImageNet


Archives = tuple[Path, dict[str, bytes]]
"""Their folder, and the validation images as they are to lie in it."""


@pytest.fixture
def archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image]
) -> Archives:
    root = tmp_path / "imagenet"
    return root, formats.write_imagenet(root, monkeypatch, photographs)


def test_imagenets_archives_are_unpacked_once_and_read_as_folders(archives: Archives) -> None:
    root, val = archives
    data = module(root)
    assert data.num_classes == 3  # before `setup`, because the model is built first
    data.setup("fit")
    assert data.class_names == list(formats.WNIDS)
    assert len(data.train_images) == 18
    assert tree(root / "val") == val
    assert [label for _, label in data.val_images.samples] == [0, 0, 1, 1, 2, 2]
    assert len(list(data.train_dataloader())) == 4
    theirs = datasets.ImageNet(root, "val")
    assert [(path, label) for path, label in theirs.samples] == list(data.val_images.samples)
    assert theirs.classes == [(f"name {label}", "other name") for label in range(3)]

    for archive in root.glob("ILSVRC2012_*"):
        archive.unlink()
    again = module(root)
    again.setup("fit")
    assert again.state_dict() == data.state_dict()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "cannot unpack .*ILSVRC2012_img_train.tar"),
        ("no devkit", "cannot unpack .*The archive ILSVRC2012_devkit_t12.tar.gz is not present"),
    ],
)
def test_archives_that_cannot_be_unpacked_are_told_in_one_line(
    archives: Archives, kind: str, words: str
) -> None:
    root, _ = archives
    train, devkit = (root / ARCHIVE_META[part][0] for part in ("train", "devkit"))
    if kind == "truncated":
        train.write_bytes(train.read_bytes()[:-2000])
    else:
        devkit.unlink()
    with pytest.raises(UserError, match=words) as caught:
        module(root).setup("fit")
    assert "\n" not in str(caught.value)
    assert not list(root.glob(".unpacking"))
    assert not (root / "train").exists()


# Data sets by name


@pytest.mark.parametrize(
    ("name", "write", "train_split", "train", "val", "classes"),
    [
        ("cifar10", formats.write_cifar10, "train", 40, 6, 10),
        ("flowers102", formats.write_flowers, "train+val", 12, 6, 102),
    ],
)
def test_torchvisions_sets_are_read_by_name(
    name: str,
    write: Callable,
    train_split: str,
    train: int,
    val: int,
    classes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    photographs: list[Image.Image],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / name, monkeypatch, photographs)
    data = module(f"torch/{name}", train_split=train_split, val_split="test")
    assert data.num_classes == classes
    data.setup("fit")
    assert (len(data.train_images), len(data.val_images)) == (train, val)
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert (labels >= 0).all()
    assert (labels < classes).all()
    if name == "cifar10":
        assert data.class_names == [f"class {i}" for i in range(10)]
        expected = formats.pixels(6, 0).transpose(0, 2, 3, 1)
        for index in range(6):
            image, label = data.val_images.samples[index]
            assert np.array_equal(np.asarray(image), expected[index])
            assert label == index


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(root="torch/cifar"),
            "no data set torch/cifar, but torch/cifar10, .*; a folder of that name is",
        ),
        (
            dict(root="torch/cifar10"),
            "torch/cifar10 is not in data/cifar10, .* add --data.download true",
        ),
        (
            dict(root="torch/stanford_cars", val_split="test", download=True),
            "cannot be downloaded anymore",
        ),
    ],
)
def test_sets_that_cannot_be_used_are_told(
    settings: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        module(**settings).setup("fit")
    assert "\n" not in str(caught.value)


def test_hugging_faces_sets_are_read_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image]
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 8), ("test", 4)):
        for i in range(count):
            path = Path(f"sets/pets/{split}/{('cat', 'dog')[i % 2]}/{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            photographs[i % 2].crop((i, i, i + 60, i + 40)).save(path)
    settings: dict = dict(val_split="test", data_dir=str(tmp_path / "cache"))
    data = module("hfds/sets/pets", **settings)
    assert data.class_names == ["cat", "dog"]
    data.setup("fit")
    assert (len(data.train_images), len(data.val_images)) == (8, 4)
    found = [
        (load_image(source), label)
        for source, label in map(data.val_images.samples.__getitem__, range(4))
    ]
    assert sorted(label for _, label in found) == [0, 0, 1, 1]
    expected = {photographs[i % 2].crop((i, i, i + 60, i + 40)).tobytes(): i % 2 for i in range(4)}
    assert {image.tobytes(): label for image, label in found} == expected
    for wrong in (dict(val_split="validation"), dict(input_key="img"), dict(target_key="labels")):
        with pytest.raises(UserError, match="hfds/sets/pets") as caught:
            module("hfds/sets/pets", **(settings | wrong)).setup("fit")
        assert "\n" not in str(caught.value)
