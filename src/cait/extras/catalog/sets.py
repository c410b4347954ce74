"""Built-in data sets, by name: torchvision's "torch/cifar10" and Hugging Face's "hfds/uoft-cs/cifar10"."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data.readers import create_reader
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import datasets
from torchvision.datasets.utils import verify_str_arg

from cait.data.dataset import MapSamples
from cait.errors import UserError
from cait.extras.catalog import BUILTIN, STREAMS
from cait.file_lock import file_lock

TORCHVISION: dict[str, type[Dataset[Any]]] = {
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "mnist": datasets.MNIST,
    "fashion_mnist": datasets.FashionMNIST,
    "flowers102": datasets.Flowers102,
    "stanford_cars": datasets.StanfordCars,
    "inaturalist": datasets.INaturalist,
}


def is_builtin(root: str) -> bool:
    """Whether `root` is the name of a built-in data set and not a folder.

    Raises:
        UserError: there is no such data set, or it cannot be read by index.
    """
    prefix, slash, name = root.partition("/")
    if not slash:
        return False
    if prefix in STREAMS:
        raise UserError(
            f"{root} is read as a stream, in an order in which a run could not be resumed; "
            "the built-in sets are torch/NAME and hfds/NAME"
        )
    if prefix == "torch" and name not in TORCHVISION:
        known = ", ".join(f"torch/{known}" for known in TORCHVISION)
        raise UserError(f"there is no data set {root}, but {known}; a folder of that name is ./{root}")
    return prefix in BUILTIN


def open_set(
    root: str,
    split: str,
    folder: Path | None = None,
    download: bool = False,
    input_key: str = "image",
    target_key: str = "label",
) -> MapSamples:
    """Open a split of a data set.

    Args:
        root: "torch/<set>", one of TORCHVISION, or "hfds/<owner>/<set>", read by timm's reader.
        split: the set's own name for it. "train+val" joins several. iNaturalist's are
            "2021_train", "2021_train_mini", "2021_valid" and, with its lists such as `train2018.json`,
            "2017_train", "2017_val" ... "2019_val".
        folder: where the set is; None means data/<set>, and Hugging Face's own cache for theirs.
        download: fetch what is missing.
        input_key: column of the images in a Hugging Face set.
        target_key: column of the classes in a Hugging Face set.

    Raises:
        UserError: the set is missing, has no such split, or the package that reads it is not installed.
    """
    if root.startswith("hfds/"):
        return _open_huggingface(root, split, folder, download, input_key=input_key, target_key=target_key)
    name = root.partition("/")[2]
    folder = folder or Path("data") / name
    try:
        return _open_torchvision(root, name, split, folder, False)
    except _NotThereError as error:
        if not download:
            raise UserError(f"{root} is not in {folder}, or not whole; to fetch it add --data.download true") from error
    with file_lock(folder.parent / f".{folder.name}.lock"):
        try:
            return _open_torchvision(root, name, split, folder, True)
        except _NotThereError as error:
            raise UserError(f"cannot fetch {root}: {' '.join(str(error).split())}") from error


class _NotThereError(Exception):
    pass


def _open_torchvision(root: str, name: str, split: str, folder: Path, download: bool) -> MapSamples:
    if not download and not folder.is_dir():
        raise _NotThereError
    kind: Any = TORCHVISION[name]
    parts: list[Dataset[Any]] = []
    names: Sequence[str] = []
    for part in split.split("+"):
        try:
            dataset, names = _torchvision_part(kind, part, folder, download)
        except UserError:
            raise
        except ValueError as error:  # no such split, or no longer available
            raise UserError(f"{root} with --data.train_split or --data.val_split {part}: {error}") from error
        except (RuntimeError, OSError) as error:
            raise _NotThereError(str(error)) from error
        parts.append(dataset)
    return MapSamples(root, split, parts[0] if len(parts) == 1 else ConcatDataset(parts), names)


def _torchvision_part(kind: Any, split: str, folder: Path, download: bool) -> tuple[Dataset[Any], Sequence[str]]:
    """One split and its class names; raises what torchvision raises."""
    if kind is datasets.INaturalist:
        return _inaturalist(split, folder, download)
    parameters = inspect.signature(kind).parameters
    options: dict[str, Any] = {"loader": Path} if "loader" in parameters else {}
    if "train" in parameters:
        options["train"] = verify_str_arg(split, "split", ("train", "test")) == "train"
    else:
        options["split"] = split
    dataset = kind(folder, download=download, **options)
    return dataset, dataset.classes


def _inaturalist(split: str, folder: Path, download: bool) -> tuple[Dataset[Any], Sequence[str]]:
    # Up to 2019 the images of both splits lie in one folder, and lists tell them apart.
    listed = {f"{year}_{part}": (year, part) for year in ("2017", "2018", "2019") for part in ("train", "val")}
    verify_str_arg(split, "split", (*listed, "2021_train", "2021_train_mini", "2021_valid"))
    year, part = listed.get(split, (split, ""))
    dataset = datasets.INaturalist(folder, year, download=download, loader=Path)
    dataset.index.sort()  # torchvision's order is the file system's
    if not part:
        return dataset, dataset.all_categories
    path = folder / f"{part}{year}.json"
    try:
        # train_val2018/<super category>/<category>/<image>.jpg
        names = {"/".join(image["file_name"].split("/")[-3:]) for image in json.loads(path.read_text())["images"]}
    except FileNotFoundError as error:
        raise UserError(
            f"{path}, the list of the split's images, is missing: github.com/visipedia/inat_comp"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a list of iNaturalist's images: {error!r}") from error
    places = [
        place for place, (label, file) in enumerate(dataset.index) if f"{dataset.all_categories[label]}/{file}" in names
    ]
    if len(places) != len(names):
        raise UserError(f"{path} lists {len(names):,} images, {len(places):,} of them are in {folder / year}")
    return Subset(dataset, places), dataset.all_categories


def _open_huggingface(root: str, split: str, folder: Path | None, download: bool, **columns: str) -> MapSamples:
    if not download:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # the package reads it on import
    try:
        importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(f"{root} needs Hugging Face's package: .venv/bin/pip install datasets") from error
    try:
        reader = create_reader(root, root=str(folder) if folder else None, split=split, **columns)
    except Exception as error:  # of many kinds, with lines of advice
        hint = "" if download else "; to fetch it add --data.download true"
        raise UserError(f"cannot open {root}, split {split!r}: {' '.join(str(error).split())}{hint}") from error
    key = columns["input_key"]
    if reader.dataset[0][key] is None:  # timm's reader fills a missing column with None
        known = ", ".join(sorted(set(reader.dataset.column_names) - {key}))
        raise UserError(f"{root} has no images in a column {key}; it has {known}: see --data.input_key")
    names = sorted(reader.class_to_idx, key=reader.class_to_idx.__getitem__)
    if not names:
        raise UserError(f"{root} names no classes in its column {columns['target_key']}; see --data.target_key")
    return MapSamples(root, split, reader, names)
