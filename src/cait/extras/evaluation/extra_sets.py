"""Further evaluation sets: some of the model's classes, as ImageNet-A and -R, or corrupted images, as ImageNet-C."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from cait.data.folder import FolderSource, abbreviate, folder_names, list_classes
from cait.data.listing import Files
from cait.errors import UserError

TEST = "test"
"""The folder of the test split, and its name among the further sets."""
SEVERITIES = ("1", "2", "3", "4", "5")
ALEXNET = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
"""AlexNet's mean top-1 error in per cent over the severities, from github.com/hendrycks/robustness."""


class ExtraSet(NamedTuple):
    samples: Files
    only: list[int] | None = None
    """Indices of the classes that it has, if it lacks some; then only these may be predicted."""


Corruptions = dict[str, dict[str, ExtraSet]]
"""Sets by corruption and severity."""


def open_extra(root: Path, names: Sequence[str]) -> ExtraSet | Corruptions:
    """List the images of a further evaluation set of the classes `names`, or of some of them.

    Class folders are matched by name or, if all are there, by index as in ImageNet-V2. As in ImageNet-C, they may lie
    in `root/<corruption>/<severity>/` or `root/<group>/<corruption>/<severity>/`.

    Raises:
        UserError: there is no such folder, or it has classes that the model does not have.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    corrupted = _corruptions(root, names)
    if not corrupted:
        return _set(root, names)
    return {
        name: {severity: _set(folder / severity, names) for severity in folder_names(folder)}
        for name, folder in corrupted.items()
    }


def open_test(source: Any) -> ExtraSet | None:
    """The test split of a data source: its `test`, or the folder "test" beside a training and a validation folder.

    None if there is none, or if it has other classes, as Kaggle's folders of images without labels do.
    """
    if (samples := getattr(source, "test", None)) is not None:
        return ExtraSet(samples)
    if not isinstance(source, FolderSource):
        return None
    folder, (_, val) = source.root / TEST, source.split_folders()
    if val is None or val == folder or not folder.is_dir():
        return None
    found, names = folder_names(folder), source.class_names
    if not found or not {*found} <= {*names}:
        rank_zero_info(f"{folder} is not scored: its class folders are not those of {val}")
        return None
    return ExtraSet(_set(folder, names).samples)  # all classes may be predicted


def _corruptions(root: Path, names: Sequence[str]) -> dict[str, Path]:
    """The folders of corruptions by name; empty if `root` holds class folders."""
    if not {*names}.isdisjoint(folder_names(root)):
        return {}
    folders = [root / name for name in folder_names(root)]
    folders += [folder / name for folder in folders for name in folder_names(folder)]
    return {folder.name: folder for folder in folders if _has_severities(folder)}


def _has_severities(folder: Path) -> bool:
    found = folder_names(folder)
    return bool(found) and {*found} <= {*SEVERITIES} and all(folder_names(folder / name) for name in found)


def _set(root: Path, names: Sequence[str]) -> ExtraSet:
    found = folder_names(root)
    if not 0 < len(found) < len(names):
        return ExtraSet(scan_extra_val(root, list(names)))
    places = {name: index for index, name in enumerate(names)}
    if unknown := [name for name in found if name not in places]:
        raise UserError(f"{root} holds class folders that the model does not know: {abbreviate(unknown)}")
    samples, only = list_classes(root, found), [places[name] for name in found]
    samples.labels = array("q", (only[label] for label in samples.labels))
    return ExtraSet(samples, only)


def scan_extra_val(root: Path, names: list[str]) -> Files:
    """List the images of another evaluation set of the same classes, such as ImageNet-V2.

    Its class folders have the classes' names, or as in ImageNet-V2 their indices. Indices sorted as text would
    be in another order: 0, 1, 10, 100, 101, ...

    Raises:
        UserError: there is no such folder, or it has other classes than `names`.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    found, indices = set(folder_names(root)), [str(index) for index in range(len(names))]
    if found == set(names):
        return list_classes(root, names)
    if found == set(indices):
        return list_classes(root, indices)
    raise UserError(
        f"{root} holds {len(found)} class folders, which are neither the model's {len(names)} classes by name "
        f"nor 0 to {len(names) - 1}"
    )


def mce(errors: Mapping[str, float]) -> float | None:
    """ImageNet-C's mean corruption error in per cent, relative to AlexNet's 100; None unless all corruptions are there.

    Hendrycks and Dietterich (arXiv 1903.12261).

    Args:
        errors: top-1 error in per cent by corruption, the mean over all severities.
    """
    if not ALEXNET.keys() <= errors.keys():
        return None
    return 100 * sum(errors[name] / ALEXNET[name] for name in ALEXNET) / len(ALEXNET)
