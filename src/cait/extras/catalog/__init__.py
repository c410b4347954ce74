"""Data sets by name, such as torch/cifar10 and hfds/uoft-cs/cifar10, and ImageNet's archives as they are downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cait.settings import Group, Settings, group


@dataclass(frozen=True)
class Catalog(Group):
    """Where a data set of the catalog is, and how it is read. `root` may also be the name of one: torchvision's
    "torch/cifar10" or Hugging Face's "hfds/uoft-cs/cifar10"."""

    data_dir: str | None = None
    """Where a built-in data set is; None means data/<set>, Hugging Face's own cache for theirs."""
    download: bool = False
    """Fetch a built-in data set that is missing."""
    input_key: str = "image"
    """Column of the images in a Hugging Face set."""
    target_key: str = "label"
    """Column of the classes in a Hugging Face set."""


GROUPS = {"data": "cait.extras.catalog:Catalog"}


def open_source(root: str, settings: Settings) -> Any:
    """The data set of that name, or the folder that holds ImageNet's archives; None for any other.

    Raises UserError if torchvision has no data set of that name.
    """
    named = root.startswith(("torch/", "hfds/")) and not Path(root).is_dir()
    # most folders: torchvision's data sets are not needed
    if not (named or any(Path(root).glob("ILSVRC2012_*.tar*"))):
        return None
    from functools import partial

    from cait.data.folder import FolderSource, Splits
    from cait.data.source import SplitSource
    from cait.extras.catalog import sets

    splits = group(Splits, settings)
    if not named:
        return FolderSource(splits, partial(sets.unpack, Path(root)))
    return SplitSource(
        root, splits.train_split, splits.val_split, sets.opener(root, group(Catalog, settings))
    )
