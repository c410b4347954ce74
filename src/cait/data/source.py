"""Where a run's images come from: `open_source` tells the kinds apart, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from cait import plugins
from cait.data import digits, folder
from cait.data.dataset import MapSamples, Samples
from cait.data.listing import Files
from cait.errors import UserError, one_line
from cait.references import is_path, locate
from cait.settings import group


@dataclass(frozen=True)
class Splits:
    """Which images train, and which validate.

    Raises:
        UserError: a setting is out of range.
    """

    root: str = "data/imagenet"
    """`root/train/<class>/*` and `root/val/<class>/*`, or `root/<class>/*`, where `val_fraction` of each class is held
    out. At "data/digits" scikit-learn's digits are written first. Or a data set of your own, "package.module:factory":
    the factory is called with split=<train_split or val_split> and returns a map-style data set with `classes`, the
    names of the classes. Its items are pairs of an image (PIL image, path or open file) and a class index, or -1 for an
    image that validation does not count. Every process calls the factory."""
    train_split: str = "train"
    """Name of the training folder in `root`, or of the data set's split; "train+val" joins two."""
    val_split: str = "val"
    """The same for validation. A data set without a validation split, such as CIFAR, has "test": then the best
    checkpoint is chosen on the images that score it, so report the last one."""
    val_fraction: float = 0.1
    """Share of each class that is held out if `root` has no training folder."""
    val_list: str | None = None
    """CSV file whose column `path` names the images to hold out of such a `root`, such as a run's validation.csv. Then
    `val_fraction` is not used."""

    def __post_init__(self) -> None:
        if not self.root:
            raise UserError("root is empty; name a folder or a data set with --data.root")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"val_fraction must be above 0 and below 1, got {self.val_fraction}")


class DataSource(Protocol):
    """The classes, the training images and the validation images of a run; UserError if they cannot be used."""

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; known before `prepare`."""
        ...

    @property
    def train(self) -> Samples: ...

    @property
    def val(self) -> Samples: ...

    def prepare(self) -> None:
        """Write or unpack what is not there yet; any number of processes may call it."""
        ...


def open_source(root: str, /, **settings: Any) -> DataSource:
    """Open the data set `root`; nothing is read yet.

    Args:
        settings: of `cait.data.datamodule.ImageNetDataModule`, by name; defaults for the others.

    Raises:
        UserError: an extra refuses the name.
    """
    settings["root"] = root
    splits: Splits = group(Splits, settings)
    if is_path(root):
        return SplitSource(root, splits.train_split, splits.val_split, partial(_open_own, root))
    for offer in plugins.of_kind("open_source"):
        if (source := offer(root, settings)) is not None:
            return source
    path = Path(root)
    if path != digits.ROOT:
        return FolderSource(splits)
    known = None if digits.is_written(path) else digits.CLASS_NAMES
    return FolderSource(splits, partial(digits.write_digits, path), known)


class FolderSource:
    """Image folders.

    Args:
        write: writes or unpacks the folders in `prepare`; any number of processes may call it.
        class_names: the classes, if they are known before `prepare`; None lists the folders.
    """

    def __init__(
        self, splits: Splits, write: Callable[[], None] | None = None, class_names: list[str] | None = None
    ) -> None:
        self.root, self.splits, self.write, self._class_names = Path(splits.root), splits, write, class_names

    def prepare(self) -> None:
        if self.write is not None:
            self.write()

    @cached_property
    def class_names(self) -> list[str]:
        if self._class_names is not None:
            return self._class_names
        self.prepare()  # now, because the model's head needs their number before Lightning prepares data
        return folder.class_names(self.root, self.splits.train_split, self.splits.val_split)

    @cached_property
    def _sets(self) -> tuple[Files, Files]:
        splits, listed = self.splits, self.splits.val_list
        how = (splits.train_split, splits.val_split, splits.val_fraction, Path(listed) if listed else None)
        return folder.scan(self.root, self.class_names, *how)

    @property
    def holds_out(self) -> bool:
        """Whether validation takes images from the class folders, because it has no folder of its own."""
        return folder.split_folders(self.root, self.splits.train_split, self.splits.val_split)[1] is None

    @property
    def train(self) -> Files:
        return self._sets[0]

    @property
    def val(self) -> Files:
        return self._sets[1]


class SplitSource:
    """A data set that is opened split by split.

    Args:
        root: its name.
        open_split: opens the split of a name.
    """

    def __init__(self, root: str, train_split: str, val_split: str, open_split: Callable[[str], MapSamples]) -> None:
        self.root, self.train_split, self.val_split, self.open_split = root, train_split, val_split, open_split

    def prepare(self) -> None:
        """Do nothing: a split is fetched when it is opened, and `cait predict` opens none."""

    @cached_property
    def _sets(self) -> tuple[MapSamples, MapSamples]:
        train, val = self.open_split(self.train_split), self.open_split(self.val_split)
        if train.class_names != val.class_names:
            raise UserError(f"{self.root}: {train.split} and {val.split} do not have the same classes")
        return train, val

    @property
    def class_names(self) -> list[str]:
        return self.train.class_names

    @property
    def train(self) -> MapSamples:
        return self._sets[0]

    @property
    def val(self) -> MapSamples:
        return self._sets[1]


def _open_own(path: str, split: str) -> MapSamples:
    """Call the factory at `path`; see `root` of `cait.data.datamodule.ImageNetDataModule`."""
    factory = locate(path)
    try:
        dataset = factory(split=split)
    except UserError:
        raise
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"cannot open {path} with split={split!r}: {reason}") from error
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(f"{path} returns {type(dataset).__name__}, which cannot be read by index: no __getitem__")
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UserError(f"{path} returns {type(dataset).__name__} without a length: no __len__") from error
    if count == 0:
        raise UserError(f"{path} with split={split!r} is empty")
    classes = getattr(dataset, "classes", None)
    names = list(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else []
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} needs `classes` on its data set, a list of the names of at least 2 classes")
    return MapSamples(path, split, dataset, names)
