"""ReaL: all right classes of each validation image ("Are we done with ImageNet?", arXiv 2006.07159)."""

from __future__ import annotations

from pathlib import Path

import torch
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cait.data.dataset import Samples
from cait.errors import UserError, one_line


def is_imagenet(class_names: list[str]) -> bool:
    """Whether the classes are ImageNet-1k's, named and ordered by WordNet's numbers, as ReaL counts them."""
    return class_names == ImageNetInfo().label_names()


def real_labels(path: str | None, samples: Samples) -> Tensor:
    """timm's reading of the right classes of each of `samples`: [len(samples), most of an image], padded with -1.

    Args:
        path: of the authors' `real.json`: for each number in ILSVRC2012_val_00000001.JPEG, a list of class indices,
            which may be empty. None takes the copy that timm ships.

    Raises:
        UserError: no such file, another format, not one list for each image, or a name without a number.
    """
    names, file = [Path(samples.name(index)).name for index in range(len(samples))], path or "timm's real.json"
    try:
        labels = RealLabelsImagenet(names, real_json=path).real_labels
        return pad_sequence([torch.tensor(labels[name], dtype=torch.long) for name in names], True, -1)
    except AssertionError as error:
        raise UserError(f"{file} has not one list for each of the {len(names):,} validation images") from error
    except KeyError as error:
        raise UserError(f"{file} has no image {error}, only as ILSVRC2012_val_00000001.JPEG") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot use the ReaL labels {file}: {one_line(error)}") from error
