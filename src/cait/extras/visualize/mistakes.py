"""The validation set scored image by image: which classes are taken for which, and which images are worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
    """What the network says of an image."""

    place: int
    """In the order of the loader."""
    label: int
    predicted: int
    probability: float
    """Of the predicted class."""
    loss: float
    """Cross entropy."""


@torch.no_grad()
def score(network: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Scored]:
    """Score batches of normalised images and labels, in float32; the highest loss comes first.

    An image with a label below 0 does not count.
    """
    device = next(network.parameters()).device
    found: list[Scored] = []
    place = 0
    for images, labels in batches:
        logits = network(images.to(device)).float().cpu()
        probabilities, predicted = logits.softmax(dim=1).max(dim=1)
        losses = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
        columns = [column.tolist() for column in (labels, predicted, probabilities, losses)]
        found += [Scored(place + row, *cells) for row, cells in enumerate(zip(*columns, strict=True))]
        place += len(labels)
    return sorted((each for each in found if each.label >= 0), key=lambda each: each.loss, reverse=True)


def confusion(scored: Sequence[Scored], class_names: Sequence[str]) -> Figure:
    """scikit-learn's confusion matrix, each row as shares of its class."""
    side = 2 + 0.4 * len(class_names)
    figure, ((axes,),) = plots.grid(1, 1, side, side)
    colours = {"norm": PowerNorm(0.4, vmin=0, vmax=1)}  # rare mistakes are visible beside the diagonal
    cells = dict(values_format=".0%", text_kw={"fontsize": 7}, im_kw=colours, colorbar=False)
    names = dict(labels=range(len(class_names)), display_labels=class_names, xticks_rotation="vertical")
    labels, predicted = [each.label for each in scored], [each.predicted for each in scored]
    ConfusionMatrixDisplay.from_predictions(labels, predicted, normalize="true", ax=axes, **cells, **names)
    return figure
