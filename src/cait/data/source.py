"""Where a run's images come from: `open_source` tells the kinds apart, and nothing else does."""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from cait import plugins
from cait.data.dataset import MapSamples, Samples
from cait.data.folder import FolderSource, Splits
from cait.errors import UserError, abbreviate, told_as
from cait.references import is_path, made
from cait.settings import group

DIGITS = Path("data/digits")
"""Where scikit-learn's 1,797 handwritten digits are written, 8×8 pixels, as a folder of PNG files."""


class DataSource(Protocol):
    """Classes and images; UserError if they are no use.

    A source may also have `digest`, bytes that a run depends on besides the images' names, `test`, further images, and
    `order`, a `cait.data.loader.Order` of the training images. If an image may have several classes it has `task`,
    their name in `TASKS` of cait.plugins; the labels of its images are then the numbers of rows in `label_sets`, 0 or 1
    for each class [labels, classes], and are called `label_names`.
    """

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; asked for before `prepare` too."""

    @property
    def train(self) -> Samples: ...

    @property
    def val(self) -> Samples: ...

    def prepare(self) -> None:
        """Write or unpack what is not there yet; any number of processes may call it."""


def open_source(root: str, /, **settings: Any) -> DataSource:
    """Open the data set `root`; nothing is read yet. Raises UserError if an extra refuses the name.

    The settings are those of `cait.data.datamodule.ImageNetDataModule`, by name; defaults for the others.
    """
    settings["root"] = root
    splits = group(Splits, settings)
    for offer in plugins.of_kind("open_source"):
        if (source := offer(root, settings)) is not None:
            return source
    if is_path(root) and not Path(root).is_dir():
        return SplitSource(root, splits.train_split, splits.val_split, partial(_open_own, root))
    return FolderSource(splits, partial(write_digits, DIGITS) if Path(root) == DIGITS else None)


@dataclass(eq=False)
class SplitSource:
    """A data set called `root` that is opened split by split, by the split's name."""

    root: str
    train_split: str
    val_split: str
    open_split: Callable[[str], MapSamples]

    def prepare(self) -> None:
        """Do nothing: a split is fetched when it is opened, and `cait predict` opens none."""

    @cached_property
    def train(self) -> MapSamples:
        return self.open_split(self.train_split)

    @cached_property
    def val(self) -> MapSamples:
        val = self.open_split(self.val_split)
        if val.class_names != self.class_names:
            raise UserError(
                f"{self.root}: {self.train_split} and {self.val_split} do not have the same classes"
            )
        return val

    @property
    def class_names(self) -> list[str]:
        return self.train.class_names


def _open_own(path: str, split: str) -> MapSamples:
    """Call the factory at `path`; see `root` of `cait.data.datamodule.ImageNetDataModule`."""
    dataset = made(path, split=split)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise UserError(
            f"{path} returns {type(dataset).__name__}, which is no data set: no __getitem__ or __len__"
        )
    with told_as(f"the length or `classes` of {path} cannot be used"):
        count = len(dataset)
        names = list(getattr(dataset, "classes", None) or [])
    if len(names) < 2 or not count or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{path} needs images, and `classes` on its data set, the names of at least 2 classes"
        )
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(f"{path} has several classes of one name: {abbreviate(twice)}")
    return MapSamples(path, split, dataset, names)


def write_digits(root: Path) -> None:
    """Write `root/{train,val}/<digit>/<number>.png` unless it is there: 1,437 and 360 images, always the same split.

    One rename puts the folder in place, so it is either whole or absent.
    """
    if root.is_dir() and any(root.iterdir()):
        return
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    _, held_out = train_test_split(
        range(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target
    )
    gray = np.round(digits.images * (255 / 16)).astype(np.uint8)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        written = Path(scratch, root.name)
        for number, label in enumerate(digits.target):
            folder = written / ("val" if number in held_out else "train") / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(gray[number]).save(folder / f"{number:04d}.png")
        try:
            written.rename(root)  # replaces an empty folder too
        except OSError:
            if not (root / "val").is_dir():  # otherwise another run was quicker
                raise
