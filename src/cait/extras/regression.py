"""Logistic regression, regularised: a linear head that is solved on the features of images.

Fine-tuning from a solved head changes the features less than from one at random ("Fine-Tuning can Distort Pretrained
Features and Underperform Out-of-Distribution", Kumar et al., ICLR 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from cait.extras.extract import evenly

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Values of C as scikit-learn has it: the larger, the weaker the regularisation."""
USUAL = 0.1
"""C where no class has enough images to hold some out."""
HELD_OUT = 5
"""One image of so many of each class is held out to choose C."""
ITERATIONS, TOLERANCE = 200, 1e-4
"""Of L-BFGS, at each C; the second is of the gradient's largest value."""
WORK = 200_000_000
"""Most images × values × classes (10 or more) that `classify` learns from: about 20 seconds of a core."""


@dataclass(frozen=True)
class Rows:
    """What a head is solved on.

    Args:
        features: float64 [N, D].
        targets: [N], the class of each row; or [N, C] of 0 and 1, if a row may have several.
        weights: [N], how much each row counts, 1 in the mean.
    """

    features: Tensor
    targets: Tensor
    weights: Tensor

    def part(self, chosen: Tensor) -> Rows:
        return Rows(self.features[chosen], self.targets[chosen], self.weights[chosen])

    def loss(self, layer: Tensor) -> Tensor:
        """The mean loss under a layer [D + 1, C]. Its last row is the bias. Of several labels, one against the rest."""
        logits = torch.addmm(layer[-1], self.features, layer[:-1])
        if self.targets.ndim == 2:
            each = binary_cross_entropy_with_logits(logits, self.targets.to(logits), reduction="none").sum(1)
        else:
            each = cross_entropy(logits, self.targets, reduction="none")
        return (each * self.weights).mean()


class Head(NamedTuple):
    """A linear layer on features as they are, [C, D] and [C], and the C that was taken."""

    weight: Tensor
    bias: Tensor
    strength: float


def solve(
    features: Tensor,
    targets: Tensor,
    classes: int,
    weights: Tensor | None = None,
    strength: float | None = None,
) -> Head:
    """The head that fits all rows best.

    The features are standardised, and the layer is folded so that it takes them as they are. One thread computes, so
    that the bits do not depend on how many there are.

    Args:
        features: [N, D].
        targets: as in `Rows`.
        classes: C, also with classes that no row has.
        weights: [N], in any unit; None counts all rows alike.
        strength: C of the regularisation; None takes the one that does best on rows which are held out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        features = features.double()
        mean, deviation = features.mean(0), features.std(0, correction=0)
        deviation = deviation.where(deviation > 0, 1.0)
        counts = torch.ones(len(features)) if weights is None else weights / weights.mean()
        rows = Rows((features - mean) / deviation, targets, counts.double())
        layer = torch.zeros(features.shape[1] + 1, classes, dtype=torch.float64)
        if strength is None:
            layer, strength = _chosen(rows, layer)
        layer = fit(rows, strength, layer)
    finally:
        torch.set_num_threads(threads)
    weight = layer[:-1].T / deviation
    return Head(weight.float(), (layer[-1] - weight @ mean).float(), strength)


def _chosen(rows: Rows, layer: Tensor) -> tuple[Tensor, float]:
    """The layer and the C with the least loss on the rows held out, from strong regularisation to weak."""
    held = held_out(rows.targets)
    if not held.any():
        return layer, USUAL
    seen, unseen = rows.part(~held), rows.part(held)
    least, best, strength = torch.inf, layer, USUAL
    for candidate in STRENGTHS:
        layer = fit(seen, candidate, layer)
        loss = unseen.loss(layer).item()
        if loss >= least:
            break
        least, best, strength = loss, layer, candidate
    return best, strength


def held_out(targets: Tensor) -> Tensor:
    """Which rows are held out, bool [N]: one of HELD_OUT of each class, spread evenly over them."""
    labels = targets.argmax(1) if targets.ndim == 2 else targets
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        held[(labels == label).nonzero()[HELD_OUT - 1 :: HELD_OUT]] = True
    return held


def fit(rows: Rows, strength: float, start: Tensor) -> Tensor:
    """The layer [D + 1, C] with the least loss and L2 penalty on all but the bias, from a start of that shape."""
    layer = start.clone().requires_grad_()
    how: Any = dict(max_iter=ITERATIONS, tolerance_grad=TOLERANCE, line_search_fn="strong_wolfe")
    optimizer = torch.optim.LBFGS([layer], **how)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rows.loss(layer) + layer[:-1].square().sum() / (2 * strength * len(rows.features))
        loss.backward()
        return loss

    optimizer.step(closure)
    return layer.detach()


def classify(rows: np.ndarray, labels: np.ndarray, others: np.ndarray, classes: int) -> np.ndarray:
    """The classes of `others` [M, D] by a head that is solved on rows [N, D], or a part of them, with C 1."""
    seen = evenly(len(rows), max(2 * classes, WORK // (rows.shape[1] * max(10, classes))))
    head = solve(torch.from_numpy(rows[seen]), torch.from_numpy(labels[seen]), classes, strength=1.0)
    return (others @ head.weight.numpy().T + head.bias.numpy()).argmax(1)
