"""Labels that may be wrong, by the probabilities of networks that have not trained on the image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cait import disk
from cait.cli import loading
from cait.data.listing import below
from cait.run import rundir
from cait.run.program import Program

DOUBTFUL = "labels.csv"
"""File in the folder of a cross-validation: all images, the doubtful ones first."""
Scored = tuple[list[str], list[int], Any]
"""Paths below the root, labels, and probabilities [N, classes], of the images that can be read."""
Row = tuple[str, str, str, str, str]
"""Of the table: path, label, its probability, and the class that seems right with its own, if the label is doubtful."""


def held_out(run: Path, program: Program) -> tuple[Any, Scored]:
    """The data module of a run, and what its last checkpoint thinks of its validation images."""
    loaded = loading.from_checkpoint(
        run / rundir.CHECKPOINTS / rundir.LAST, run, None, None, program.module, program.data
    )
    data = loaded.data
    samples = data.source.val
    probabilities, labels = map(np.concatenate, zip(*loaded.judge(samples), strict=True))
    readable = np.flatnonzero(labels >= 0).tolist()
    paths = [below(data.root, samples.name(index)) for index in readable]
    return data, (paths, [samples[index][1] for index in readable], probabilities[readable])


def suspects(probabilities: Any, labels: Any) -> tuple[Any, Any]:
    """(indices of the images whose label is doubtful, the most doubtful first; the class that each seems to be of)

    Confident learning (Northcutt, Jiang and Chuang, arXiv 1911.00068): a class may be that of an image if its
    probability is at least the mean that images with this label have. If the most probable of these classes is not
    the label, and neither is the most probable of all, the label is doubtful, the more so the further its probability
    is below that class's. Probabilities [N, classes] are by networks that have not trained on the image; labels [N].
    """
    confidence = probabilities[np.arange(len(labels)), labels]
    means = np.full(probabilities.shape[1], np.inf)
    for label in np.unique(labels):
        means[label] = confidence[labels == label].mean()
    possible = np.where(probabilities >= means - 1e-6, probabilities, -np.inf)
    seems = possible.argmax(axis=1)
    differs = (seems != labels) & (probabilities.argmax(axis=1) != labels)
    doubtful = np.flatnonzero(np.isfinite(possible.max(axis=1)) & differs)
    margins = confidence[doubtful] - probabilities[doubtful, seems[doubtful]]
    doubtful = doubtful[margins.argsort(kind="stable")]
    return doubtful, seems[doubtful]


def write(
    folder: Path,
    class_names: Sequence[str],
    folds: Sequence[Scored],
    groups: Mapping[str, str],
    test: Sequence[tuple[str, str]] = (),
) -> list[Row]:
    """Write `DOUBTFUL`; returns the rows of the doubtful labels.

    The table is one that --data.labels takes, so one can correct the column `label` and train on it. `groups` has the
    group of each path, if images have any. `test` are path and label of images that are in no fold; they stay apart by
    a column `split`.
    """
    paths, labels, probabilities = map(np.concatenate, zip(*folds, strict=True))

    def row(index: int, suggestion: str = "", its_probability: str = "") -> Row:
        label = labels[index]
        return (
            str(paths[index]),
            class_names[label],
            f"{probabilities[index, label]:.4f}",
            suggestion,
            its_probability,
        )

    doubtful, seems = suspects(probabilities, labels)
    rows = [
        row(index, class_names[seem], f"{probabilities[index, seem]:.4f}")
        for index, seem in zip(doubtful.tolist(), seems.tolist(), strict=True)
    ]
    others = np.setdiff1d(np.arange(len(paths)), doubtful).tolist()
    head = ["path", "label", "probability", "suggestion", "its probability"]
    table: list[Sequence[str]] = [
        *rows,
        *map(row, others),
        *((*image, "", "", "") for image in test),
    ]
    if groups:
        head.append("group")
        table = [(*cells, groups.get(cells[0], "")) for cells in table]
    if test:
        head.append("split")
        table = [
            (*cells, "train" if number < len(paths) else "test")
            for number, cells in enumerate(table)
        ]
    disk.write_csv(folder / DOUBTFUL, head, table)
    return rows
