"""Counts beyond loss and accuracy: the confusion matrix, how sure the network is, accuracy on ReaL's labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from cait.cli.evaluate import Scores
from cait.extras.evaluation import calibration

CONFUSIONS = 20
"""Pairs of classes that are listed as the most confused."""
CLASSES_IN_MATRIX = 1000
"""With more classes only the cells of the confusion matrix that are not 0 are listed."""


class RealAccuracy(Metric):
    """Top-1 and top-5 in per cent where several classes may be right; an image without any is not counted."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Images, those right at the first guess, those right within five. Integers, so that the sums are exact.
        self.add_state("counts", torch.zeros(3, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes], right classes [B, L], padded with -1."""
        best = logits.topk(min(5, logits.shape[1])).indices
        hits = (best[:, :, None] == labels[:, None, :]).any(dim=2)  # [B, 5]
        self.counts += torch.stack([(labels >= 0).any(dim=1).sum(), hits[:, 0].sum(), hits.any(dim=1).sum()])

    def compute(self) -> Scores:
        images, *right = self.counts.tolist()
        acc1, acc5 = (100 * count / images if images else None for count in right)
        return {"acc1": acc1, "acc5": acc5, "images": images}


class Guesses(Metric):
    """The cell of each image in the confusion matrix, and the probability of its predicted class.

    The matrix itself would take 3.5 GB with 21,000 classes.
    """

    cells: list[Tensor]
    confidence: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("cells", [], dist_reduce_fx="cat")
        self.add_state("confidence", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Note a batch: logits [B, num_classes], labels [B]. Labels below 0 are not counted."""
        cells = labels * self.num_classes + logits.argmax(dim=1)
        self.cells.append(cells.where(labels >= 0, -1))  # to leave them out now, the host would wait for the device
        self.confidence.append(logits.float().softmax(dim=1).amax(dim=1))

    def compute(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(true classes [N], predicted classes [N], probabilities of these [N])"""
        cells, confidence = (dim_zero_cat(values).cpu().numpy() for values in (self.cells, self.confidence))
        true, predicted = np.divmod(cells[cells >= 0], self.num_classes)
        return true, predicted, confidence[cells >= 0]


class Counts(nn.Module):
    """The counts of one set of weights, exact over several processes.

    Args:
        wanted: accuracy, as a share, whose threshold to find; None finds none.
    """

    def __init__(self, num_classes: int, wanted: float | None = None) -> None:
        super().__init__()
        self.wanted = wanted
        self.guesses = Guesses(num_classes)
        self.real = RealAccuracy()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Labels below 0 are not counted."""
        self.guesses.update(logits, labels)
        if real is not None:
            self.real.update(logits, real.where(labels[:, None] >= 0, -1))

    def compute(self, class_names: list[str], with_real: bool) -> Scores:
        """The scores by name; the README lists them."""
        true, predicted, confidence = self.guesses.compute()
        right, classes = true == predicted, len(class_names)
        of_class, guessed = (np.bincount(each, minlength=classes) for each in (true, predicted))
        cells, images = np.unique(true * classes + predicted, return_counts=True)
        confusion = np.stack([*np.divmod(cells, classes), images], axis=1)
        finite = np.isfinite(confidence)  # logits may be NaN
        confidence, right = confidence[finite], right[finite]
        scores: Scores = {
            "confusion": confusion.tolist(),
            "confusions": _most_confused(confusion, of_class, class_names),
            "never_predicted": [class_names[i] for i in np.flatnonzero((guessed == 0) & (of_class > 0))],
            "calibration": calibration.calibration(confidence, right),
            "thresholds": calibration.thresholds(confidence, right),
            "wanted_accuracy": None if self.wanted is None else calibration.reach(confidence, right, self.wanted),
        }
        if classes <= CLASSES_IN_MATRIX:
            matrix = np.zeros((classes, classes), np.int64)
            matrix.flat[cells] = images
            scores["confusion"] = matrix.tolist()
        return scores | ({"real": self.real.compute()} if with_real else {})


def _most_confused(confusion: np.ndarray, of_class: np.ndarray, class_names: Sequence[str]) -> list[Scores]:
    """The pairs of classes with the most mistakes, the most first; `share` is of the true class, in per cent."""
    wrong = confusion[confusion[:, 0] != confusion[:, 1]]
    order = np.argsort(-wrong[:, 2], kind="stable")[:CONFUSIONS]
    return [
        {
            "true": class_names[true],
            "predicted": class_names[predicted],
            "images": int(images),
            "share": 100 * images / of_class[true],
        }
        for true, predicted, images in wrong[order].tolist()
    ]
