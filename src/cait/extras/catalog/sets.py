"""Built-in data sets, by name: torchvision's "torch/cifar10" and Hugging Face's "hfds/uoft-cs/cifar10"."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from timm.data.readers import create_reader
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import datasets
from torchvision.datasets.utils import verify_str_arg

from cait.data.dataset import MapSamples
from cait.errors import UserError, one_line, to_install
from cait.extras.catalog import STREAMS, Catalog
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
Part = tuple[Dataset[Any], list[str]]
"""A split and its class names."""


def check_name(root: str) -> None:
    """Raise UserError if there is no data set of this name, or it cannot be read by index."""
    if root.startswith(STREAMS):
        raise UserError(
            f"{root} is read as a stream, in an order in which a run could not be resumed; "
            "the built-in sets are torch/NAME and hfds/NAME"
        )
    if root.startswith("torch/") and root.removeprefix("torch/") not in TORCHVISION:
        known = ", ".join(f"torch/{name}" for name in TORCHVISION)
        raise UserError(f"there is no data set {root}, but {known}; a folder of that name is ./{root}")


def open_set(root: str, catalog: Catalog, split: str) -> MapSamples:
    """Open a split of a data set.

    Args:
        root: "torch/<set>", one of TORCHVISION, or "hfds/<owner>/<set>", read by timm's reader.
        split: the set's own name for it. "train+val" joins several. iNaturalist's are
            "2021_train", "2021_train_mini", "2021_valid" and, with its lists such as `train2018.json`,
            "2017_train", "2017_val" ... "2019_val".

    Raises:
        UserError: the set is missing, has no such split, or the package that reads it is not installed.
    """
    if root.startswith("hfds/"):
        return _open_huggingface(root, catalog, split)
    name = root.removeprefix("torch/")
    folder = Path(catalog.data_dir or f"data/{name}")
    try:
        if not folder.is_dir():  # torchvision would make it
            raise FileNotFoundError(folder)
        return _open_torchvision(root, split, folder, download=False)
    except (RuntimeError, OSError) as error:
        if not catalog.download:
            raise UserError(f"{root} is not in {folder}, or not whole; to fetch it add --data.download true") from error
    with file_lock(folder.parent / f".{folder.name}.lock"):
        try:
            return _open_torchvision(root, split, folder, download=True)
        except (RuntimeError, OSError) as error:
            raise UserError(f"cannot fetch {root}: {one_line(error)}") from error


def _open_torchvision(root: str, split: str, folder: Path, download: bool) -> MapSamples:
    """Open a split, or several joined by "+". Raises UserError, or what torchvision raises for a missing set."""
    kind = TORCHVISION[root.removeprefix("torch/")]
    try:
        parts = [_torchvision_part(kind, part, folder, download) for part in split.split("+")]
    except ValueError as error:  # no such split, or no longer available
        raise UserError(f"{root} with --data.train_split or --data.val_split {split}: {error}") from error
    return MapSamples(root, split, ConcatDataset([dataset for dataset, _ in parts]), parts[0][1])


def _torchvision_part(kind: Any, split: str, folder: Path, download: bool) -> Part:
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


def _inaturalist(split: str, folder: Path, download: bool) -> Part:
    # Up to 2019 the images of both splits lie in one folder, and lists tell them apart.
    listed = {f"{year}_{part}": (year, part) for year in ("2017", "2018", "2019") for part in ("train", "val")}
    verify_str_arg(split, "split", (*listed, "2021_train", "2021_train_mini", "2021_valid"))
    year, part = listed.get(split, (split, ""))
    dataset = datasets.INaturalist(folder, year, download=download, loader=Path)
    dataset.index.sort()  # torchvision's order is the file system's
    categories = dataset.all_categories
    if not part:
        return dataset, categories
    path = folder / f"{part}{year}.json"
    try:
        # train_val2018/<super category>/<category>/<image>.jpg
        names = {"/".join(image["file_name"].split("/")[-3:]) for image in json.loads(path.read_text())["images"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a list of github.com/visipedia/inat_comp: {error!r}") from error
    places = [place for place, (label, file) in enumerate(dataset.index) if f"{categories[label]}/{file}" in names]
    if len(places) != len(names):
        raise UserError(f"{path} lists {len(names):,} images, {len(places):,} of them are in {folder / year}")
    return Subset(dataset, places), categories


def _open_huggingface(root: str, catalog: Catalog, split: str) -> MapSamples:
    key, target = catalog.input_key, catalog.target_key
    if not catalog.download:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # the package reads it on import
    try:
        importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(f"{root} needs Hugging Face's package: {to_install('datasets')}") from error
    try:
        reader = create_reader(root, root=catalog.data_dir or None, split=split, input_key=key, target_key=target)
    except Exception as error:  # of many kinds, with lines of advice
        hint = "" if catalog.download else "; to fetch it add --data.download true"
        raise UserError(f"cannot open {root}, split {split!r}: {one_line(error)}{hint}") from error
    if reader.dataset[0][key] is None:  # timm's reader fills a missing column with None
        known = ", ".join(sorted(set(reader.dataset.column_names) - {key}))
        raise UserError(f"{root} has no images in a column {key}; it has {known}: see --data.input_key")
    names = sorted(reader.class_to_idx, key=reader.class_to_idx.__getitem__)
    if not names:
        raise UserError(f"{root} names no classes in its column {target}; see --data.target_key")
    return MapSamples(root, split, reader, names)
