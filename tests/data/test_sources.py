"""A data set of one's own: what it may hold, and what is told of it."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from modules import images_in

from cait.data import table
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import load_image
from cait.errors import UserError

module = partial(images_in, repeats=1)


OWN = '''
from io import BytesIO
from pathlib import Path
import numpy as np
import torch
from modules import images_in
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

class Pets(Dataset):
    """Colors as a PIL image, a path and an open file by turns."""

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
Method = varying("Method", classes=lambda self: ["cat", "dog", "owl"])
Twice = varying("Twice", classes=["cat", "dog", "cat"])
Tensors = varying("Tensors", image=lambda self, index: torch.zeros(3, 40, 40))
High = varying("High", label=lambda self, index: index // 5)
Unlabeled = varying("Unlabeled", label=lambda self, index: -1 if index == 2 else 0)

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
        image = load_image(raw)
        assert (image.size, image.getpixel((0, 0)), label) == (
            (40 + index, 50),
            (5 * index, 90, 200),
            index % 3,
        )
    assert data.train_images.samples.name(4) == f"{own}:Pets/train/4"
    # An image depends only on (seed, epoch, index, repeat), not on the process, even if its item draws.
    data, other = (
        module(f"{own}:Noisy", backend=backend, num_workers=n, mixup=0, cutmix=0) for n in (0, 2)
    )
    data.setup("fit")
    other.setup("fit")
    first, second = list(data.train_dataloader()), list(other.train_dataloader())
    for a, b in zip(data.val_dataloader(), other.val_dataloader(), strict=True):
        assert torch.equal(a[0], b[0])
    assert len(first) == 6
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(first, second, strict=True)
    )
    assert data.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "cannot import own_data:nothing"),
        ("generator", "returns generator, which is no data set"),
        ("NoClasses", "own_data:NoClasses needs images, and `classes`"),
        ("Method", "`classes` of own_data:Method cannot be used: TypeError"),
        ("Twice", "own_data:Twice has several classes of one name: cat"),
        ("Differ", "own_data:Differ: train and val do not have the same classes"),
        (
            "Tensors",
            r"the image of own_data:Tensors/train/\d+ is of type Tensor; it must be a PIL image, a path or an",
        ),
        ("High", r"own_data:High/train/\d+ has the label [34], there are 3 classes"),
        ("Unlabeled", "the training image own_data:Unlabeled/train/2 has no label"),
    ],
)
def test_a_data_set_of_another_shape_ends_the_run_in_one_line(
    own: str, name: str, words: str
) -> None:
    data = module(f"{own}:{name}", max_bad_share=0.9)

    def read() -> None:
        data.setup("fit")
        list(data.train_dataloader())

    with pytest.raises(UserError, match=words) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_an_image_that_ones_own_data_set_cannot_read_is_replaced_and_listed_once(
    own: str, tmp_path: Path
) -> None:
    data = module(f"{own}:Torn", max_bad_share=0.1, num_workers=1)
    data.unreadable_path = tmp_path / "unreadable_images.csv"
    data.setup("fit")
    for _ in range(2):
        assert len(list(data.train_dataloader())) == 6
        assert data.unreadable.check() == 1
    head, *rows = data.unreadable_path.read_text().splitlines()
    assert head == "image,reason"
    assert len(rows) == 1
    assert [int(label) for _, labels in data.val_dataloader() for label in labels] == [
        0,
        1,
        2,
        0,
        -1,
        2,
        0,
        1,
        2,
    ]
    assert data.unreadable.read() == {
        f"own_data:Torn/{split}/4": f"cannot read the image own_data:Torn/{split}/4: the disk is gone"
        for split in ("train", "val")
    }


def test_a_subclass_brings_a_source_of_its_own(mixed_root: Path) -> None:
    class Both(ImageNetDataModule):
        """Trains on the validation images too."""

        def make_source(self) -> object:
            source = super().make_source()
            both = table.Images([*source.train, *source.val])
            return SimpleNamespace(
                class_names=source.class_names, train=both, val=source.val, prepare=source.prepare
            )

    data = Both(str(mixed_root), img_size=32, batch_size=4, num_workers=0)
    data.setup("fit")
    assert len(data.train_images) == 51
    state = data.state_dict()
    assert state["class_names"] == ["cat", "dog", "owl"]
    assert state["depends_on"]["training pictures"] == 51
