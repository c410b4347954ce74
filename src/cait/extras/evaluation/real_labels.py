"""ReaL: all right classes of each validation image ("Are we done with ImageNet?", arXiv 2006.07159)."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cait import disk
from cait.data.dataset import Samples
from cait.errors import UserError


def is_imagenet(class_names: list[str]) -> bool:
    """Whether the classes are ImageNet-1k's, named and ordered by WordNet's numbers, as ReaL counts them."""
    return class_names == ImageNetInfo().label_names()


def real_labels(path: str | None, samples: Samples, num_classes: int) -> Tensor:
    """Read the right classes of each of `samples`: [len(samples), most classes of an image], padded with -1.

    The file is the authors' `real.json`: for each number in ILSVRC2012_val_00000001.JPEG, a list of class
    indices, which may be empty. None takes the copy that timm ships.

    Raises:
        UserError: no such file, another format, not one list for each image, or a name without a number.
    """
    file = resources.files("timm.data") / "_info" / "imagenet_real_labels.json" if path is None else Path(path)
    if not file.is_file():
        raise UserError(f"the ReaL labels {file} do not exist")
    try:
        lists = json.loads(disk.read_text(Path(str(file))))
    except ValueError as error:  # json's and Unicode's
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(lists, list) or not all(_classes(labels, num_classes) for labels in lists):
        raise UserError(f"{file} is not a list of lists of class indices from 0 to {num_classes - 1}")
    if len(lists) != len(samples):
        raise UserError(f"{file} has labels for {len(lists):,} images, the validation set has {len(samples):,}")
    numbers = [_number(samples.name(index)) for index in range(len(samples))]
    if strange := [number for number in numbers if not 1 <= number <= len(lists)]:
        raise UserError(f"an image is number {strange[0]:,}, {file} has labels for {len(lists):,} images")
    if len(set(numbers)) != len(numbers):
        raise UserError("two validation images have one number, so ReaL's labels cannot be assigned")
    return pad_sequence([torch.tensor(lists[number - 1], dtype=torch.long) for number in numbers], True, -1)


def _classes(labels: object, num_classes: int) -> bool:
    return isinstance(labels, list) and all(type(label) is int and 0 <= label < num_classes for label in labels)


def _number(name: str) -> int:
    found = re.search(r"ILSVRC2012_val_(\d+)", Path(name).name)
    if not found:
        raise UserError(f"ReaL goes by numbers as in ILSVRC2012_val_00000001.JPEG, and {name} has none")
    return int(found[1])
