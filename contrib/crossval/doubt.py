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
    from cait.guards import trust

    with trust.only_own(False):
        checkpoint = run / rundir.CHECKPOINTS / rundir.LAST
        loaded = loading.from_checkpoint(checkpoint, run, None, None, program.module, program.data)
    data, samples = loaded.data, loaded.data.source.val
    found, read = map(np.concatenate, zip(*loaded.judge(samples), strict=True))
    kept = np.flatnonzero(read >= 0).tolist()
    paths = [below(data.root, samples.name(index)) for index in kept]
    labels = [samples[index][1] for index in kept]
    return data, (paths, labels, found[kept])


def suspects(probabilities: Any, labels: Any) -> tuple[Any, Any]:
    """(indices of the images whose label is doubtful, the most doubtful first; the class that each seems to be of)

    Confident learning (Northcutt, Jiang and Chuang, arXiv 1911.00068): a class may be that of an image if its
    probability is at least the mean that images with this label have. If the most probable of these classes is not
    the label, and neither is the most probable of all, the label is doubtful, the more so the further its probability
    is below that class's. Probabilities [N, classes] are by networks that have not trained on the image; labels [N].
    """
    given = probabilities[np.arange(len(labels)), labels]
    present = np.bincount(labels, minlength=probabilities.shape[1]) > 0
    means = np.array([given[labels == label].mean() if there else np.inf for label, there in enumerate(present)])
    possible = np.where(probabilities >= means - 1e-6, probabilities, -np.inf)
    seems = possible.argmax(axis=1)
    other = (seems != labels) & (probabilities.argmax(axis=1) != labels)
    found = np.flatnonzero(np.isfinite(possible.max(axis=1)) & other)
    margins = given[found] - probabilities[found, seems[found]]
    found = found[margins.argsort(kind="stable")]
    return found, seems[found]


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
    paths = [path for found, _, _ in folds for path in found]
    labels = np.array([label for _, found, _ in folds for label in found])
    probabilities = np.concatenate([found for _, _, found in folds])
    given, found, seems = probabilities[np.arange(len(labels)), labels], *suspects(probabilities, labels)
    suggested = {
        index: (class_names[seem], f"{probabilities[index, seem]:.4f}")
        for index, seem in zip(found.tolist(), seems.tolist(), strict=True)
    }
    """By the index of a doubtful label, the most doubtful first: what seems right, and its probability."""
    rows: list[Row] = [
        (paths[index], class_names[labels[index]], f"{given[index]:.4f}", *suggested.get(index, ("", "")))
        for index in (*suggested, *(index for index in range(len(labels)) if index not in suggested))
    ]
    head = ["path", "label", "probability", "suggestion", "its probability"]
    listed: list[Sequence[str]] = [*rows, *((*each, "", "", "") for each in test)]
    if groups:
        head, listed = [*head, "group"], [(*row, groups.get(row[0], "")) for row in listed]
    if test:
        splits = ["train"] * len(rows) + ["test"] * len(test)
        head, listed = [*head, "split"], [(*row, split) for row, split in zip(listed, splits, strict=True)]
    disk.write_csv(folder / DOUBTFUL, head, listed)
    return rows[: len(suggested)]
