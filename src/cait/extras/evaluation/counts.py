"""Counts beyond loss and accuracy: the confusion matrix, how sure the network is, accuracy on ReaL's labels."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from cait.cli.evaluate import Scores

BINS = 15
"""Of the calibration error."""
CLASSES_IN_MATRIX = 1000
"""With more classes there is no confusion matrix: it would take gigabytes."""


class Counts(nn.Module):
    """The counts of one set of weights, exact over several processes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        quick: dict[str, Any] = dict(ignore_index=-1, validate_args=False)
        self.confusion = MulticlassConfusionMatrix(num_classes, **quick) if num_classes <= CLASSES_IN_MATRIX else None
        self.calibration = MulticlassCalibrationError(num_classes, BINS, **quick)
        self.real_acc1, self.real_acc5, self.real_images = MeanMetric(), MeanMetric(), SumMetric()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Those below 0 are not counted."""
        if self.confusion is not None:
            self.confusion.update(logits, labels)
        probabilities = logits.float().softmax(dim=1)
        self.calibration.update(probabilities, labels.where(probabilities[:, 0].isfinite(), -1))  # it may be NaN
        if real is not None:  # an image without a right class is not counted
            best = logits.topk(min(5, logits.shape[1])).indices
            counted = (labels >= 0) & (real >= 0).any(dim=1)
            hits = (best[:, :, None] == real[:, None, :]).any(dim=2)[counted]  # [images, 5]
            self.real_acc1.update(hits[:, 0])
            self.real_acc5.update(hits.any(dim=1))
            self.real_images.update(len(hits))

    def compute(self, with_real: bool) -> Scores:
        """The scores by name; the README lists them."""
        scores: Scores = {"calibration": _percent(self.calibration.compute())}
        if self.confusion is not None:
            scores["confusion"] = self.confusion.compute().tolist()
        if with_real:
            scores["real"] = {
                "acc1": _percent(self.real_acc1.compute()),
                "acc5": _percent(self.real_acc5.compute()),
                "images": int(self.real_images.compute()),
            }
        return scores


def _percent(share: Tensor) -> float | None:
    return None if math.isnan(share) else 100 * float(share)
