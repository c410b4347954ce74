"""A data set of one's own: how its items are read."""

from types import SimpleNamespace

import pytest
import torch
from harness import in_folder
from modules import images_in
from same import same

from cait.data import table
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import load_image

OWN = '''
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


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

    def __getitem__(self, index):
        return self.image(index), torch.tensor(index % 3)  # whatever is an index


class Noisy(Pets):
    def image(self, index):
        return Image.new("RGB", (40, 40), tuple(np.random.randint(0, 256, 3)))


class Torn(Pets):
    def image(self, index):
        if index == 4:
            raise OSError("the disk is gone")
        return super().image(index)
'''


@pytest.fixture
def own(tmp_path):
    """A module beside the user's runs."""
    (tmp_path / "own_data.py").write_text(OWN)
    with in_folder(tmp_path):
        yield "own_data"


def module(path, **settings):
    return images_in(path, repeats=1, mixup=0, cutmix=0, **settings)


def test_its_items_are_images_paths_or_open_files(own):
    data = module(f"{own}:Pets")
    assert data.class_names == ["cat", "dog", "owl"]  # before `setup`, as the model is built first
    data.setup("fit")
    for index in range(9):
        raw, label = data.val_images.samples[index]
        image = load_image(raw)
        assert image.size == (40 + index, 50)
        assert image.getpixel((0, 0)) == (5 * index, 90, 200)
        assert label == index % 3
    assert data.train_images.samples.name(4) == f"{own}:Pets/train/4"


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_pixels_do_not_depend_on_the_process_even_if_an_item_draws(own, backend):
    ours, theirs = (module(f"{own}:Noisy", backend=backend, num_workers=n) for n in (0, 2))
    ours.setup("fit")
    theirs.setup("fit")
    assert same([*ours.train_dataloader()], [*theirs.train_dataloader()])
    assert same([*ours.val_dataloader()], [*theirs.val_dataloader()])
    assert ours.state_dict() == theirs.state_dict()


def test_an_image_that_it_cannot_read_is_replaced_and_listed_once(own, tmp_path):
    data = module(f"{own}:Torn", max_bad_share=0.1, num_workers=1)
    data.unreadable_path = tmp_path / "unreadable_images.csv"
    data.setup("fit")
    for _ in range(2):
        assert len(list(data.train_dataloader())) == 6
        assert data.unreadable.check() == 1
    head, *rows = data.unreadable_path.read_text().splitlines()
    assert head == "image,reason"
    assert len(rows) == 1
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert labels.tolist() == [0, 1, 2, 0, -1, 2, 0, 1, 2]
    assert [*data.unreadable.read()] == ["own_data:Torn/train/4", "own_data:Torn/val/4"]


class TrainsOnBoth(ImageNetDataModule):
    """Trains on the validation images too."""

    def make_source(self):
        source = super().make_source()
        both = table.Images([*source.train, *source.val])
        return SimpleNamespace(
            class_names=source.class_names, train=both, val=source.val, prepare=source.prepare
        )


def test_a_subclass_brings_a_source_of_its_own(mixed_root):
    data = TrainsOnBoth(str(mixed_root), img_size=32, batch_size=4, num_workers=0)
    data.setup("fit")
    assert len(data.train_images) == 51
    state = data.state_dict()
    assert state["class_names"] == ["cat", "dog", "owl"]
    assert state["depends_on"]["training pictures"] == 51
