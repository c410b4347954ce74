"""How far a network's probabilities can be trusted, and from which probability on to believe its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BINS = 15
THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def calibration(confidence: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """The expected calibration error and the bins of its diagram, all in per cent.

    Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599): the mean over BINS bins of equal width,
    weighted by their images, of |accuracy - confidence|.

    Args:
        confidence: the probability of the predicted class, [N].
        right: whether it is the true one, [N].
    """
    place = np.ceil(confidence.astype(np.float64) * BINS).astype(int).clip(1, BINS) - 1  # (0, 1/15], (1/15, 2/15], ...
    images, sure, hits = (np.bincount(place, weights, BINS) for weights in (None, confidence, right))
    error = np.abs(hits - sure).sum() / max(len(right), 1)
    bins = [
        {"images": int(count), "confidence": _percent(total, count), "accuracy": _percent(correct, count)}
        for count, total, correct in zip(images, sure, hits, strict=True)
    ]
    return {"ece": 100 * float(error) if len(right) else None, "bins": bins}


def thresholds(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, float | None]]:
    """What remains if answers below a probability are "don't know": coverage and accuracy in per cent."""
    return [_answered(confidence, right, threshold) for threshold in THRESHOLDS]


def reach(confidence: np.ndarray, right: np.ndarray, accuracy: float) -> dict[str, float | None]:
    """The lowest threshold whose answers have at least this accuracy, a share; `threshold` is None if none has.

    Images of the same confidence are answered together.
    """
    order = np.argsort(-confidence, kind="stable")
    ordered, hits = confidence[order], np.cumsum(right[order])
    last = np.append(ordered[1:] != ordered[:-1], True) if len(ordered) else np.array([], bool)
    enough = np.flatnonzero(last & (hits >= accuracy * np.arange(1, len(ordered) + 1) - 1e-9))
    if not len(enough):
        return {"wanted": 100 * accuracy, "threshold": None, "coverage": 0.0, "accuracy": None}
    return {"wanted": 100 * accuracy, **_answered(confidence, right, float(ordered[enough[-1]]))}


def _answered(confidence: np.ndarray, right: np.ndarray, threshold: float) -> dict[str, float | None]:
    answered = confidence >= threshold
    return {
        "threshold": threshold,
        "coverage": _percent(answered.sum(), len(right)),
        "accuracy": _percent(right[answered].sum(), answered.sum()),
    }


def _percent(part: float, whole: float) -> float | None:
    return 100 * float(part) / float(whole) if whole else None


def diagram(found: Mapping[str, Mapping[str, Any]]) -> Any:
    """The reliability diagram of each set of weights: accuracy over confidence, and below the images of each bin.

    On the dashed line the accuracy is the confidence.

    Args:
        found: results of `calibration`, by title.
    """
    from cait.extras import plots  # matplotlib takes a second to import

    figure, axes = plots.grid(2, len(found), 3.6 * len(found), 4.4, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
    centres = (np.arange(BINS) + 0.5) * 100 / BINS
    for column, (title, calibrated) in enumerate(found.items()):
        above, below = axes[:, column]
        heights = [each["accuracy"] or 0.0 for each in calibrated["bins"]]
        above.plot([0, 100], [0, 100], color="#999999", linewidth=1, linestyle="--", zorder=3)
        above.bar(centres, heights, 100 / BINS, edgecolor="white")
        error = "no images" if calibrated["ece"] is None else f"calibration error {calibrated['ece']:.1f} %"
        above.set(title=f"{title}: {error}", ylabel="accuracy in %", xlim=(0, 100), ylim=(0, 100))
        below.bar(centres, [each["images"] for each in calibrated["bins"]], 100 / BINS, edgecolor="white")
        below.set(xlabel="probability of the predicted class in %", ylabel="images")
    return figure
