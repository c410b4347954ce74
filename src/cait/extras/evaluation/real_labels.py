"""ReaL: all right classes of each validation image ("Are we done with ImageNet?", arXiv 2006.07159)."""

from __future__ import annotations

from pathlib import Path

import torch
from timm.data import RealLabelsImagenet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cait.data.dataset import Samples
from cait.errors import UserError, one_line


def real_labels(path: str | None, samples: Samples) -> Tensor:
    """timm's reading of the right classes of each of `samples`: [len(samples), most of an image], padded with -1.

    Args:
        path: of the authors' `real.json`: for each number in ILSVRC2012_val_00000001.JPEG, a list of class indices,
            which may be empty. None takes the copy that timm ships.

    Raises:
        UserError: no such file, another format, not one list for each image, or a name without a number.
    """
    names = [Path(samples.name(index)).name for index in range(len(samples))]
    try:
        labels = RealLabelsImagenet(names, real_json=path).real_labels
        return pad_sequence([torch.tensor(labels[name], dtype=torch.long) for name in names], True, -1)
    except (AssertionError, KeyError, OSError, ValueError, TypeError) as error:
        file, why = path or "timm's real.json", f"{type(error).__name__} {one_line(error)}".strip()
        what = f"lists for the {len(names):,} validation images, called as ILSVRC2012_val_00000001.JPEG"
        raise UserError(f"the ReaL labels {file} are not {what}: {why}") from error
