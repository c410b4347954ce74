"""How far a network's probabilities can be trusted, and from which probability on to believe its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torchmetrics.classification import MulticlassCalibrationError
from torchmetrics.functional.classification import binary_recall_at_fixed_precision
from torchmetrics.utilities import dim_zero_cat

BINS = 15
THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


class CalibrationError(MulticlassCalibrationError):
    """torchmetrics' error, and more of the probabilities that it keeps: of each image its predicted class's.

    Args:
        wanted: accuracy, as a share, whose threshold to find; None finds none.
    """

    def __init__(self, num_classes: int, wanted: float | None = None) -> None:
        super().__init__(num_classes, BINS, ignore_index=-1, validate_args=False)
        self.wanted = wanted

    def compute(self) -> Any:
        """The scores by name, in per cent; the README lists them."""
        error = float(super().compute())
        confidence, right = (dim_zero_cat(values).cpu().numpy() for values in (self.confidences, self.accuracies))
        right = right.astype(bool)
        return {
            "calibration": {"ece": None if math.isnan(error) else 100 * error, "bins": _bins(confidence, right)},
            "thresholds": [_answered(confidence, right, threshold) for threshold in THRESHOLDS],
            "wanted_accuracy": None if self.wanted is None else _reached(confidence, right, self.wanted),
        }


def _bins(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Those of the diagram, of equal width."""
    images, sure, hits = (
        np.histogram(confidence, BINS, (0, 1), weights=weights)[0]
        for weights in (None, confidence, right.astype(float))
    )
    return [
        {"images": int(count), "confidence": _percent(total, count), "accuracy": _percent(correct, count)}
        for count, total, correct in zip(images, sure, hits, strict=True)
    ]


def _reached(confidence: np.ndarray, right: np.ndarray, accuracy: float) -> dict[str, float | None]:
    """The threshold with the most right answers of all whose answers have this accuracy; None if none has."""
    recall = threshold = 0.0
    if len(right):
        preds, target = torch.from_numpy(confidence), torch.from_numpy(right).int()
        recall, threshold = map(float, binary_recall_at_fixed_precision(preds, target, accuracy))
    if recall == 0:
        return {"wanted": 100 * accuracy, "threshold": None, "coverage": 0.0, "accuracy": None}
    return {"wanted": 100 * accuracy, **_answered(confidence, right, threshold)}


def _answered(confidence: np.ndarray, right: np.ndarray, threshold: float) -> dict[str, float | None]:
    """What remains if answers below a probability are "don't know"."""
    answered = confidence >= threshold
    return {
        "threshold": threshold,
        "coverage": _percent(answered.sum(), len(right)),
        "accuracy": _percent(right[answered].sum(), answered.sum()),
    }


def _percent(part: float, whole: float) -> float | None:
    return 100 * float(part) / float(whole) if whole else None


def diagram(found: Mapping[str, Mapping[str, Any]]) -> Any:
    """The reliability diagram of each set of weights, by title: accuracy over confidence, from `calibration`.

    On the dashed line the accuracy is the confidence.
    """
    from cait.extras import plots  # matplotlib takes a second to import

    figure, axes = plots.panels(len(found), 3.6, 3.4)
    centres = (np.arange(BINS) + 0.5) * 100 / BINS
    for panel, (title, calibrated) in zip(axes, found.items(), strict=True):
        panel.plot([0, 100], [0, 100], color="#999999", linewidth=1, linestyle="--", zorder=3)
        panel.bar(centres, [each["accuracy"] or 0.0 for each in calibrated["bins"]], 100 / BINS, edgecolor="white")
        error = "no images" if calibrated["ece"] is None else f"calibration error {calibrated['ece']:.1f} %"
        panel.set(title=f"{title}: {error}", xlabel="probability of the predicted class in %", ylabel="accuracy in %")
        panel.set(xlim=(0, 100), ylim=(0, 100))
    return figure
