"""Where a run's images come from: `open_source` tells the kinds apart, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from torch.utils.data import IterableDataset

from cait.data import digits, folder
from cait.data.dataset import MapSamples, Samples
from cait.errors import UserError, one_line
from cait.extras.catalog import imagenet, sets
from cait.extras.shards.source import CACHE, ShardSource, is_shards
from cait.references import is_path, locate


class DataSource(Protocol):
    """The classes, the training images and the validation images of a run."""

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their indices; known before `prepare`. Raises UserError."""
        ...

    @property
    def train(self) -> Samples:
        """The training images. Raises UserError if they cannot be used."""
        ...

    @property
    def val(self) -> Samples:
        """The validation images. Raises UserError if they cannot be used."""
        ...

    def prepare(self) -> None:
        """Write or unpack what is not there yet; any number of processes may call it."""
        ...


def open_source(
    root: str,
    train_split: str = "train",
    val_split: str = "val",
    val_fraction: float = 0.1,
    val_list: str | None = None,
    data_dir: str | None = None,
    download: bool = False,
    input_key: str = "image",
    target_key: str = "label",
    cache_gb: float = 20.0,
    by_chunk: bool = False,
) -> DataSource:
    """Open the data set `root`; nothing is read yet.

    The arguments are settings of `cait.data.datamodule.ImageNetDataModule`, except `by_chunk`, see `ShardSource`.

    Raises:
        UserError: there is no built-in data set of that name, or the shards are not finished.
    """
    if is_path(root):
        return SplitSource(root, train_split, val_split, partial(_open_own, root))
    if is_shards(root):
        return ShardSource(root, train_split, val_split, Path(data_dir) if data_dir else CACHE, cache_gb, by_chunk)
    if sets.is_builtin(root):
        open_split = partial(
            sets.open_set,
            root,
            folder=Path(data_dir) if data_dir else None,
            download=download,
            input_key=input_key,
            target_key=target_key,
        )
        return SplitSource(root, train_split, val_split, open_split)
    path = Path(root)
    where = (path, train_split, val_split, val_fraction, Path(val_list) if val_list else None)
    if path == digits.ROOT:
        known = None if digits.is_written(path) else digits.CLASS_NAMES
        return FolderSource(*where, partial(digits.write_digits, path), known)
    unpack = partial(imagenet.unpack, path, train_split, val_split)
    return FolderSource(*where, unpack)


class FolderSource:
    """Image folders, which `prepare` first writes or unpacks.

    Args:
        class_names: the classes, if they are known before `prepare`; None lists the folders.
    """

    def __init__(
        self,
        root: Path,
        train_split: str,
        val_split: str,
        val_fraction: float,
        val_list: Path | None,
        prepare: Callable[[], None],
        class_names: list[str] | None = None,
    ) -> None:
        self.root, self.train_split, self.val_split, self.val_fraction = root, train_split, val_split, val_fraction
        self.val_list, self.prepare = val_list, prepare
        self._class_names = class_names

    @cached_property
    def class_names(self) -> list[str]:
        if self._class_names is not None:
            return self._class_names
        self.prepare()  # now, because the model's head needs their number before Lightning prepares data
        return folder.class_names(self.root, self.train_split, self.val_split)

    @cached_property
    def _sets(self) -> tuple[folder.Files, folder.Files]:
        splits = (self.train_split, self.val_split, self.val_fraction, self.val_list)
        return folder.scan(self.root, self.class_names, *splits)

    @property
    def holds_out(self) -> bool:
        """Whether validation takes images from the class folders, because it has no folder of its own."""
        return folder.split_folders(self.root, self.train_split, self.val_split)[1] is None

    @property
    def train(self) -> folder.Files:
        return self._sets[0]

    @property
    def val(self) -> folder.Files:
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
