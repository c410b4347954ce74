"""The validation set scored image by image: which classes are taken for which, and which images are worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from cait import disk
from cait.data.folder import FolderSource
from cait.extras import plots

LABELLED = 30
"""Up to this many classes the confusion matrix has their names and counts."""
CAPTION = "A row is a true class: where its images went. Colours are shares of the row; an empty cell has no image."
HEADER = ("path", "label", "split", "probability", "suggestion", "its probability")
"""Of the table of labels."""


class Scored(NamedTuple):
    """One value per image, in the order of the loader."""

    labels: np.ndarray
    """Index of the true class; below 0 for an image that does not count."""
    predicted: np.ndarray
    probabilities: np.ndarray
    """Probability of the predicted class."""
    losses: np.ndarray
    """Cross entropy."""

    @property
    def counted(self) -> np.ndarray:
        return self.labels >= 0

    @property
    def wrong(self) -> np.ndarray:
        return self.counted & (self.predicted != self.labels)

    def worst(self, most: int) -> list[int]:
        """The wrong images with the highest loss, the worst first."""
        return [index for index in self.doubtful() if self.wrong[index]][:most]

    def doubtful(self) -> list[int]:
        """The images that count, by their loss, the highest first."""
        return [index for index in (-self.losses).argsort(kind="stable").tolist() if self.counted[index]]

    def confusions(self, most: int) -> list[tuple[tuple[int, int], int]]:
        """((true class, predicted class), images) of the most frequent confusions, the most frequent first."""
        pairs = zip(self.labels[self.wrong].tolist(), self.predicted[self.wrong].tolist(), strict=True)
        return Counter(sorted(pairs)).most_common(most)


@torch.no_grad()
def score(network: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Scored:
    """Score batches of normalised images and labels, in float32."""
    device = next(network.parameters()).device
    columns: list[tuple[Tensor, ...]] = []
    for images, labels in batches:
        logits = network(images.to(device)).float().cpu()
        probabilities, predicted = logits.softmax(dim=1).max(dim=1)
        losses = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
        columns.append((labels, predicted, probabilities, losses))
    return Scored(*(torch.cat(column).numpy() for column in zip(*columns, strict=True)))


def confusion(scored: Scored, class_names: Sequence[str]) -> Figure:
    """The confusion matrix, each row as shares of its class. A cell without an image is left empty."""
    classes = len(class_names)
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (scored.labels[scored.counted], scored.predicted[scored.counted]), 1)
    shares = np.ma.masked_equal(matrix / matrix.sum(axis=1, keepdims=True).clip(1), 0)
    side = max(3.65, 0.55 + 0.3 * classes + 0.07 * max(map(len, class_names))) if classes <= LABELLED else 6.5
    figure, ((axes,),) = plots.grid(1, 1, side, side)
    axes.imshow(shares, norm=PowerNorm(0.4, vmin=0, vmax=1))  # rare mistakes are visible beside the diagonal
    axes.set(xlabel="predicted class", ylabel="true class")
    if classes <= LABELLED:
        axes.set_xticks(range(classes), class_names, rotation=90)
        axes.set_yticks(range(classes), class_names)
        for row, column in np.argwhere(matrix):
            colour = "#111111" if shares[row, column] > 0.6 else "white"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=7, color=colour)
    return figure


def write_labels(path: Path, source: FolderSource, scored: Scored) -> None:
    """List the scored validation images by their loss, the highest first. The others follow as the run divides them.

    So one can correct the column `label`, and train on the table: it names all images.
    """
    disk.write_csv(path, HEADER, _rows(source, scored))


def _rows(source: FolderSource, scored: Scored) -> Iterator[tuple[str, ...]]:
    names, start = source.class_names, len(str(source.root)) + 1
    for index in scored.doubtful():
        path, label = source.val[index]
        taken, of_label = scored.predicted[index], f"{np.exp(-scored.losses[index]):.4f}"
        suggestion = (names[taken], f"{scored.probabilities[index]:.4f}") if taken != label else ("", "")
        yield path[start:], names[label], "val", of_label, *suggestion
    for split in ("train", "test"):
        for path, label in getattr(source, split, None) or ():
            yield path[start:], names[label], split, "", "", ""
