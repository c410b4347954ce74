"""Where images come from besides class folders: ImageNet's archives, torchvision's and Hugging Face's sets."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import formats
import numpy as np
import pytest
import torch
from modules import images_in
from PIL import Image
from torchvision import datasets
from torchvision.datasets.imagenet import ARCHIVE_META

from cait.data import folder
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import load_rgb
from cait.errors import UserError

module = partial(images_in, repeats=1)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# The archives of ImageNet


Archives = tuple[Path, dict[str, bytes]]
"""Their folder, and the validation images as they are to lie in it."""


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image]) -> Archives:
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
def test_archives_that_cannot_be_unpacked_are_told_in_one_line(archives: Archives, kind: str, words: str) -> None:
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
        (dict(root="torch/cifar"), "no data set torch/cifar, but torch/cifar10, .*; a folder of that name is"),
        (dict(root="torch/cifar10"), "torch/cifar10 is not in data/cifar10, .* add --data.download true"),
        (dict(root="torch/stanford_cars", val_split="test", download=True), "cannot be downloaded anymore"),
        (dict(root="cifar10"), "the data folder cifar10 does not exist; name yours with --data.root"),
        (dict(root="own:nothing"), "cannot import own:nothing"),
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
    found = [(load_rgb(source), label) for source, label in map(data.val_images.samples.__getitem__, range(4))]
    assert sorted(label for _, label in found) == [0, 0, 1, 1]
    expected = {photographs[i % 2].crop((i, i, i + 60, i + 40)).tobytes(): i % 2 for i in range(4)}
    assert {image.tobytes(): label for image, label in found} == expected
    for wrong in (dict(val_split="validation"), dict(input_key="img"), dict(target_key="labels")):
        with pytest.raises(UserError, match="hfds/sets/pets") as caught:
            module("hfds/sets/pets", **(settings | wrong)).setup("fit")
        assert "\n" not in str(caught.value)


# A data set of one's own


OWN = '''
from io import BytesIO
from pathlib import Path
import numpy as np
import torch
from modules import images_in
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

class Pets(Dataset):
    """Colours as a PIL image, a path and an open file by turns."""

    classes = ["cat", "dog", "owl"]

    def __init__(self, split="train"):
        self.count = {"train": 24, "val": 9}[split]

    def __len__(self):
        return self.count

    def image(self, index):
        image = Image.new("RGB", (40 + index, 50), (5 * index, 90, 200))
        if index % 3 == 0:
            return image
        path = Path(f"{index}.png")
        image.save(path)
        return path if index % 3 == 1 else BytesIO(path.read_bytes())

    def label(self, index):
        return torch.tensor(index % 3)  # whatever is an index

    def __getitem__(self, index):
        return self.image(index), self.label(index)

def varying(name, **parts):
    return type(name, (Pets,), parts)

Noisy = varying("Noisy", image=lambda self, index: Image.new("RGB", (40, 40), tuple(np.random.randint(0, 256, 3))))
NoClasses = varying("NoClasses", classes=None)
Tensors = varying("Tensors", image=lambda self, index: torch.zeros(3, 40, 40))
High = varying("High", label=lambda self, index: index // 5)
Unlabelled = varying("Unlabelled", label=lambda self, index: -1 if index == 2 else 0)

class Torn(Pets):
    def image(self, index):
        if index == 4:
            raise OSError("the disk is gone")
        return super().image(index)

class Differ(Pets):
    def __init__(self, split):
        super().__init__(split)
        self.classes = ["cat", "dog", split]

def generator(split):
    yield from Pets(split)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the user's runs."""
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    return "own_data"


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_a_data_set_of_ones_own_is_read_by_its_path(own: str, backend: str) -> None:
    data = module(f"{own}:Pets", backend=backend)
    assert data.class_names == ["cat", "dog", "owl"]  # before `setup`, as the model is built first
    data.setup("fit")
    for index in range(9):
        raw, label = data.val_images.samples[index]
        image = load_rgb(raw)
        assert (image.size, image.getpixel((0, 0)), label) == ((40 + index, 50), (5 * index, 90, 200), index % 3)
    assert data.train_images.samples.name(4) == f"{own}:Pets/train/4"
    # An image depends only on (seed, epoch, index, repeat), not on the process, even if its item draws.
    data, other = (module(f"{own}:Noisy", backend=backend, num_workers=n, mixup=0, cutmix=0) for n in (0, 2))
    data.setup("fit")
    other.setup("fit")
    first, second = list(data.train_dataloader()), list(other.train_dataloader())
    for a, b in zip(data.val_dataloader(), other.val_dataloader(), strict=True):
        assert torch.equal(a[0], b[0])
    assert len(first) == 6
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert data.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generator", "returns generator, which is no data set"),
        ("NoClasses", "own_data:NoClasses needs images, and `classes`"),
        ("Differ", "own_data:Differ: train and val do not have the same classes"),
        ("Tensors", r"the image of own_data:Tensors/train/\d+ is of type Tensor; it must be a PIL image, a path or an"),
        ("High", r"own_data:High/train/\d+ has the label [34], there are 3 classes"),
        ("Unlabelled", "the training image own_data:Unlabelled/train/2 has no label"),
    ],
)
def test_a_data_set_of_another_shape_ends_the_run_in_one_line(own: str, name: str, words: str) -> None:
    data = module(f"{own}:{name}", max_bad_share=0.9)

    def read() -> None:
        data.setup("fit")
        list(data.train_dataloader())

    with pytest.raises(UserError, match=words) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_an_image_that_ones_own_data_set_cannot_read_is_replaced_and_listed_once(own: str, tmp_path: Path) -> None:
    data = module(f"{own}:Torn", max_bad_share=0.1, num_workers=1)
    data.unreadable_path = tmp_path / "unreadable_images.csv"
    data.setup("fit")
    for _ in range(2):
        assert len(list(data.train_dataloader())) == 6
        assert data.unreadable.check() == 1
    head, *rows = data.unreadable_path.read_text().splitlines()
    assert head == "image,reason"
    assert len(rows) == 1
    assert [int(label) for _, labels in data.val_dataloader() for label in labels] == [0, 1, 2, 0, -1, 2, 0, 1, 2]
    assert data.unreadable.read() == {
        f"own_data:Torn/{split}/4": f"cannot read the image own_data:Torn/{split}/4: the disk is gone"
        for split in ("train", "val")
    }


def test_a_subclass_brings_a_source_of_its_own(mixed_root: Path) -> None:
    class Both(ImageNetDataModule):
        """Trains on the validation images too."""

        def make_source(self) -> object:
            source = super().make_source()
            both = folder.Files([*source.train, *source.val])
            return SimpleNamespace(class_names=source.class_names, train=both, val=source.val, prepare=source.prepare)

    data = Both(str(mixed_root), img_size=32, batch_size=4, num_workers=0)
    data.setup("fit")
    assert len(data.train_images) == 51
    state = data.state_dict()
    assert state["class_names"] == ["cat", "dog", "owl"]
    assert state["depends_on"]["training pictures"] == 51
