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
from sklearn.metrics import ConfusionMatrixDisplay
from torch import Tensor

from cait.extras import plots

MOST_CLASSES = 30
"""With more classes a confusion matrix has no room for their names."""
CAPTION = "A row is a true class: the shares of its images that went to each class."


class Scored(NamedTuple):
    """One value for each image that counts, those of the highest loss first."""

    places: np.ndarray
    """Number of the image in the order of the loader."""
    labels: np.ndarray
    """Index of the true class."""
    predicted: np.ndarray
    probabilities: np.ndarray
    """Probability of the predicted class."""
    losses: np.ndarray
    """Cross entropy."""

    def wrong(self) -> Scored:
        """The wrong ones alone."""
        is_wrong = self.predicted != self.labels
        return Scored(*(values[is_wrong] for values in self))

    def confusions(self, most: int) -> list[tuple[tuple[int, int], int]]:
        """((true class, predicted class), images) of the most frequent pairs, the most frequent first."""
        pairs = zip(self.labels.tolist(), self.predicted.tolist(), strict=True)
        return Counter(sorted(pairs)).most_common(most)


@torch.no_grad()
def score(network: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Scored:
    """Score batches of normalised images and labels, in float32; an image with a label below 0 does not count."""
    device = next(network.parameters()).device
    columns: list[tuple[Tensor, ...]] = []
    for images, labels in batches:
        logits = network(images.to(device)).float().cpu()
        probabilities, predicted = logits.softmax(dim=1).max(dim=1)
        losses = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
        columns.append((labels, predicted, probabilities, losses))
    found = [torch.cat(column) for column in zip(*columns, strict=True)]
    order = found[-1].argsort(descending=True, stable=True)
    order = order[found[0][order] >= 0]
    return Scored(order.numpy(), *(values[order].numpy() for values in found))


def confusion(scored: Scored, class_names: Sequence[str]) -> Figure:
    """scikit-learn's confusion matrix, each row as shares of its class."""
    side = 2 + 0.4 * len(class_names)
    figure, ((axes,),) = plots.grid(1, 1, side, side)
    colours = {"norm": PowerNorm(0.4, vmin=0, vmax=1)}  # rare mistakes are visible beside the diagonal
    cells = dict(values_format=".0%", text_kw={"fontsize": 7}, im_kw=colours, colorbar=False)
    names = dict(labels=range(len(class_names)), display_labels=class_names, xticks_rotation="vertical")
    ConfusionMatrixDisplay.from_predictions(
        scored.labels, scored.predicted, normalize="true", ax=axes, **cells, **names
    )
    return figure
