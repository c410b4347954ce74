"""Features on disk: an archive of numpy's, or Apache Parquet. Either is whole or not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cait import disk
from cait.errors import UserError, printable, to_install


@dataclass(frozen=True)
class Features:
    """What a network's head sees of images.

    Args:
        features: float32 [N, d].
        names: the images' paths below their folder.
        labels: int64 [N], the index of each image's class; -1 without classes.
        class_names: [C].
        training: how many come first, to train on, if the others are to validate on.
    """

    features: np.ndarray
    names: Sequence[str]
    labels: np.ndarray
    class_names: Sequence[str]
    training: int | None = None

    def __len__(self) -> int:
        return len(self.labels)


def check(path: Path) -> None:
    """Raise UserError if the file cannot be written: it exists, or its format is unknown or lacks its package."""
    if path.suffix not in WRITERS:
        raise UserError(f"{path} must end in {' or '.join(WRITERS)}")
    if path.exists():
        raise UserError(f"{path} exists; move it away or name another file with --output")
    disk.check_output(path)
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(f"Parquet needs pyarrow: {to_install('pyarrow')}, or name a file that ends in .npz")


def write(path: Path, found: Features) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as beside:
        WRITERS[path.suffix](beside, found)


def _npz(path: Path, found: Features) -> None:
    """Arrays `features`, `names`, `labels` and `class_names`, none of them pickled."""
    arrays: dict[str, Any] = {key: np.array(texts, dtype=np.str_) for key, texts in _texts(found).items()}
    with path.open("wb") as file:
        np.savez(file, features=found.features, labels=found.labels, **arrays)


def _parquet(path: Path, found: Features) -> None:
    """A row for each image: name, label, class (null without classes), features."""
    import pyarrow  # type: ignore[import-not-found, unused-ignore]
    from pyarrow import parquet  # type: ignore[import-not-found, unused-ignore]

    texts = _texts(found)
    classes = [texts["class_names"][label] if label >= 0 else None for label in found.labels.tolist()]
    width = found.features.shape[1]
    columns = {
        "name": pyarrow.array(texts["names"], pyarrow.string()),
        "label": pyarrow.array(found.labels),
        "class": pyarrow.array(classes, pyarrow.string()),
        "features": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(found.features.ravel()), width),
    }
    parquet.write_table(pyarrow.table(columns), path)


def _texts(found: Features) -> dict[str, list[str]]:
    """The names as text: bytes of a name that are none become a mark."""
    return {key: [*map(printable, getattr(found, key))] for key in ("names", "class_names")}


WRITERS: dict[str, Callable[[Path, Features], None]] = {".npz": _npz, ".parquet": _parquet}
