"""The validation set scored image by image: which classes are taken for which, and which images are worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from cait.extras import plots

LABELLED = 30
"""Up to this many classes the confusion matrix has their names and counts; beyond, it is an image."""
CAPTION = "A row is a true class: where its images went. Colours are shares of the row; an empty cell has no image."
MOST_CELLS = 200
"""Cells along a side of that image; neighbouring classes share one if there are more."""
SHADES = PowerNorm(0.4, vmin=0, vmax=1)
"""Makes rare mistakes visible beside the diagonal."""


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

    @property
    def acc1(self) -> float:
        """In per cent; NaN if no image counts."""
        counted = int(self.counted.sum())
        return 100 * (1 - int(self.wrong.sum()) / counted) if counted else float("nan")

    def worst(self, most: int) -> list[int]:
        """The wrong images with the highest loss, the worst first."""
        wrong = np.flatnonzero(self.wrong)
        return wrong[np.argsort(-self.losses[wrong], kind="stable")][:most].tolist()

    def confusions(self, most: int) -> list[tuple[int, int, int]]:
        """(true class, predicted class, images) of the most frequent confusions, the most frequent first."""
        pairs = zip(self.labels[self.wrong].tolist(), self.predicted[self.wrong].tolist(), strict=True)
        return [(*pair, count) for pair, count in Counter(sorted(pairs)).most_common(most)]


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
    cells = min(classes, MOST_CELLS)
    rows, columns = (values[scored.counted] * cells // classes for values in (scored.labels, scored.predicted))
    matrix = np.zeros((cells, cells), np.int64)
    np.add.at(matrix, (rows, columns), 1)
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(1)
    named = classes <= LABELLED
    side = max(3.65, 0.55 + 0.3 * classes + 0.07 * max(map(len, class_names))) if named else 6.5
    figure, axes = plots.grid(1, 1, side, side if named else 0.85 * side)
    axis = axes[0, 0]
    shown = axis.imshow(np.ma.masked_equal(shares, 0), norm=SHADES, extent=(-0.5, classes - 0.5, classes - 0.5, -0.5))
    axis.set(xlabel="predicted class", ylabel="true class")
    if not named:
        figure.colorbar(shown, ax=axis, shrink=0.7, label="share of the true class")
    else:
        axis.set_xticks(range(classes), class_names, rotation=90, parse_math=False)
        axis.set_yticks(range(classes), class_names, parse_math=False)
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                colour = "#111111" if shares[row, column] > 0.6 else "white"
                axis.text(column, row, str(count), ha="center", va="center", fontsize=7, color=colour)
    return figure
