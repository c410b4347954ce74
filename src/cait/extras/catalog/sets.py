"""Data sets by name, torchvision's "torch/cifar10" and Hugging Face's "hfds/uoft-cs/cifar10"; ImageNet's archives."""

import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from timm.data.readers import create_reader
from torch.utils.data import ConcatDataset
from torchvision import datasets
from torchvision.datasets.utils import verify_str_arg

from cait import disk
from cait.data.dataset import MapSamples
from cait.errors import UserError, one_line
from cait.extras.catalog import Catalog

TORCHVISION: dict[str, Any] = {
    "torch/cifar10": datasets.CIFAR10,
    "torch/cifar100": datasets.CIFAR100,
    "torch/mnist": datasets.MNIST,
    "torch/fashion_mnist": datasets.FashionMNIST,
    "torch/flowers102": datasets.Flowers102,
    "torch/stanford_cars": datasets.StanfordCars,
}
IMAGENET_SPLITS = ("train", "val")
TO_FETCH = "to fetch it add --data.download true"


def opener(root: str, catalog: Catalog) -> Callable[[str], MapSamples]:
    """What opens a split of the data set `root`, "torch/<set>" or "hfds/<owner>/<set>"; "train+val" joins two.

    It raises UserError: the set is missing, has no such split, or the package that reads it is not installed.
    """
    if root.startswith("hfds/"):
        return partial(_open_huggingface, root, catalog)
    if root not in TORCHVISION:
        raise UserError(
            f"there is no data set {root}, but {', '.join(TORCHVISION)}; a folder of that name is ./{root}"
        )
    return partial(_open_torchvision, root, catalog)


def _open_torchvision(root: str, catalog: Catalog, split: str) -> MapSamples:
    folder = Path(catalog.data_dir or f"data/{root.removeprefix('torch/')}")
    with (
        disk.file_lock(folder.parent / f".{folder.name}.lock")
        if catalog.download
        else nullcontext()
    ):
        try:
            parts = [
                _part(TORCHVISION[root], folder, part, catalog.download)
                for part in split.split("+")
            ]
        except ValueError as error:  # no such split, or no longer available
            raise UserError(
                f"{root} with --data.train_split or --data.val_split {split}: {error}"
            ) from error
        except (RuntimeError, OSError) as error:
            if catalog.download:
                raise UserError(f"cannot fetch {root}: {one_line(error)}") from error
            raise UserError(f"{root} is not in {folder}, or not whole; {TO_FETCH}") from error
    return MapSamples(root, split, ConcatDataset(parts), parts[0].classes)


def _part(kind: Any, folder: Path, split: str, download: bool) -> Any:
    """One split of a torchvision set, which takes `split` or whether to `train`."""
    if "train" not in inspect.signature(kind).parameters:
        return kind(folder, split=split, download=download, loader=Path)
    verify_str_arg(split, "split", ("train", "test"))
    return kind(folder, train=split == "train", download=download)


def _open_huggingface(root: str, catalog: Catalog, split: str) -> MapSamples:
    key = catalog.input_key
    if not catalog.download:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # the package reads it on import
    try:
        reader = create_reader(
            root,
            root=catalog.data_dir,
            split=split,
            input_key=key,
            target_key=catalog.target_key,
        )
    except Exception as error:  # of many kinds, with lines of advice
        hint = "" if catalog.download else f"; {TO_FETCH}"
        raise UserError(f"cannot open {root}, split {split!r}: {one_line(error)}{hint}") from error
    if reader.dataset[0][key] is None:  # timm's reader fills a missing column with None
        known = ", ".join(sorted(set(reader.dataset.column_names) - {key}))
        raise UserError(
            f"{root} has no images in a column {key}; it has {known}: see --data.input_key"
        )
    names = sorted(reader.class_to_idx, key=reader.class_to_idx.__getitem__)
    if not names:
        raise UserError(
            f"{root} names no classes in its column {catalog.target_key}; see --data.target_key"
        )
    return MapSamples(root, split, reader, names)


def unpack(root: Path) -> None:
    """Unpack ImageNet's archives in `root` into `root/{train,val}/<wnid>/*.JPEG`, with torchvision.

    A folder appears by one rename, so it is whole or absent; the next call removes what a killed one has left. One
    process unpacks and all others wait. torchvision checks the MD5 sums of the published files first. The archives
    stay; the folders need as much space again, 155 GB. Raises UserError if an archive is missing or is not the
    published file, or the disk is full.
    """
    if all((root / split).is_dir() for split in IMAGENET_SPLITS):
        return
    with disk.file_lock(root / ".unpacking.lock"):
        for split in IMAGENET_SPLITS:
            if not (root / split).is_dir():
                _unpack_whole(root.absolute(), split)


def _unpack_whole(root: Path, split: str) -> None:
    """Unpack one split in a folder beside it, which holds links to the archives, and rename it at the end."""
    scratch = root / ".unpacking"
    disk.remove(scratch)
    print(
        f"unpacking ImageNet's {split} images in {root}, once; the MD5 sum is checked first",
        flush=True,
    )
    try:
        scratch.mkdir()
        for archive in root.glob("ILSVRC2012_*.tar*"):
            (scratch / archive.name).symlink_to(archive)
        datasets.ImageNet(scratch, split)
        os.sync()  # the images must be on disk before the name that marks them complete
        (scratch / split).rename(root / split)
    except Exception as error:  # torchvision's, tarfile's, the disk's
        raise UserError(f"cannot unpack ImageNet in {root}: {one_line(error)}") from error
    finally:
        disk.remove(scratch)
