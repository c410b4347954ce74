"""Further evaluation sets: of the model's classes, as ImageNet-V2, or of some, as ImageNet-A and -R; ReaL's labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from timm.data import RealLabelsImagenet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cait.data.dataset import Samples
from cait.data.folder import FolderSource, class_folders, list_classes
from cait.data.table import Images
from cait.errors import UserError, abbreviate

TEST = "test"
"""The folder of the test split, and its name among the further sets."""


class ExtraSet(NamedTuple):
    samples: Images
    only: list[int] | None = None
    """Indices of the classes that it has, if it lacks some; then only these may be predicted."""


def open_extra(root: Path, names: Sequence[str]) -> ExtraSet:
    """List the images of a further evaluation set of the classes `names`, or of some of them.

    Class folders are matched by name or, if all are there, by index as in ImageNet-V2. Indices sorted as text would be
    in another order: 0, 1, 10, 100, 101, ... Raises UserError if there is no such folder, or it has classes that the
    model does not have.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    folders = [*class_folders(root)]
    indices = [str(index) for index in range(len(names))]
    if {*folders} == {*indices} != {*names}:
        return ExtraSet(list_classes([root], indices, root))
    index_of = {name: index for index, name in enumerate(names)}
    if unknown := [name for name in folders if name not in index_of]:
        raise UserError(
            f"{root} holds class folders that the model does not know: {abbreviate(unknown)}"
        )
    if not folders:
        raise UserError(f"{root} holds no class folders")
    only = [index_of[name] for name in folders]
    samples = Images((path, only[label]) for path, label in list_classes([root], folders, root))
    return ExtraSet(samples, only if len(only) < len(names) else None)


def open_test(source: Any) -> ExtraSet | None:
    """The test split of a data source: its `test`, or the folder "test" beside a training and a validation folder.

    None if there is none, or if it has other classes, as Kaggle's folders of images without labels do.
    """
    if (samples := getattr(source, "test", None)) is not None:
        return ExtraSet(samples)
    if not isinstance(source, FolderSource):
        return None
    folder = source.root / TEST
    _, val = source.split_folders()
    if val is None or val == folder or not folder.is_dir():
        return None
    try:
        # all classes may be predicted
        return ExtraSet(open_extra(folder, source.class_names).samples)
    except UserError as error:
        rank_zero_info(f"{folder} is not scored: {error}")
        return None


def real_labels(samples: Samples) -> Tensor | None:
    """All right classes of each of ImageNet's validation images ("Are we done with ImageNet?", arXiv 2006.07159).

    It is timm's copy, [len(samples), most of an image], padded with -1; None if these are not the 50,000 images, or
    have other names than ILSVRC2012_val_00000001.JPEG.
    """
    names = [Path(samples.name(index)).name for index in range(len(samples))]
    try:
        labels = RealLabelsImagenet(names).real_labels
        return pad_sequence(
            [torch.tensor(labels[name], dtype=torch.long) for name in names], True, -1
        )
    except (AssertionError, KeyError):
        rank_zero_info(
            "ReaL is not scored: these are not ImageNet's 50,000 validation images under their names"
        )
        return None
