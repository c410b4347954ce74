"""The labels of a run's images as a table that --data.labels takes, the most doubtful ones first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cait import disk
from cait.data.folder import FolderSource
from cait.extras.visualize.mistakes import Scored

TABLE = "labels.csv"
HEADER = ("path", "label", "split", "probability", "suggestion", "its probability")


def write(path: Path, source: FolderSource, scored: Scored) -> None:
    """List the scored validation images by their loss, the highest first. The others follow as the run divides them.

    So one can correct the column `label`, and train on the table: it names all images.
    """
    disk.write_csv(path, HEADER, _rows(source, scored))


def _rows(source: FolderSource, scored: Scored) -> Iterator[tuple[Any, ...]]:
    names, start = source.class_names, len(str(source.root)) + 1
    for index in (-scored.losses).argsort(kind="stable"):
        path, label = source.val[index]
        taken, probability = scored.predicted[index], scored.probabilities[index]
        suggestion = (names[taken], f"{probability:.4f}") if taken != label else ("", "")
        if scored.counted[index]:  # it could be read
            yield path[start:], names[label], "val", f"{math.exp(-scored.losses[index]):.4f}", *suggestion
    for split in ("train", "test"):
        for path, label in getattr(source, split, None) or ():
            yield path[start:], names[label], split, "", "", ""
