"""Counts beyond loss and accuracy: the confusion matrix, how sure the network is, accuracy on ReaL's labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from cait.cli.evaluate import Scores
from cait.extras.evaluation.calibration import CalibrationError

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


class Counts(nn.Module):
    """The counts of one set of weights, exact over several processes.

    The confusion matrix takes 8 bytes a cell: 8 MB with 1,000 classes, 3.5 GB with 21,000.

    Args:
        wanted: accuracy, as a share, whose threshold to find; None finds none.
    """

    def __init__(self, num_classes: int, wanted: float | None = None) -> None:
        super().__init__()
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)
        self.calibration = CalibrationError(num_classes, wanted)
        self.real = RealAccuracy()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Labels below 0 are not counted."""
        labels = labels.clamp(min=-1)
        self.confusion.update(logits, labels)
        probabilities = logits.float().softmax(dim=1)
        self.calibration.update(probabilities, labels.where(probabilities[:, 0].isfinite(), -1))  # it may be NaN
        if real is not None:
            self.real.update(logits, real.where(labels[:, None] >= 0, -1))

    def compute(self, class_names: list[str], with_real: bool) -> Scores:
        """The scores by name; the README lists them."""
        matrix = self.confusion.compute().cpu()
        has_images, is_guessed = matrix.any(dim=1), matrix.any(dim=0)
        cells = matrix.nonzero()
        listed = torch.cat([cells, matrix[tuple(cells.T)][:, None]], dim=1)
        scores: Scores = {
            "confusion": (matrix if len(matrix) <= CLASSES_IN_MATRIX else listed).tolist(),
            "confusions": _most_confused(matrix, class_names),
            "never_predicted": [class_names[i] for i in (has_images & ~is_guessed).nonzero().flatten()],
        }
        return scores | self.calibration.compute() | ({"real": self.real.compute()} if with_real else {})


def _most_confused(matrix: Tensor, class_names: Sequence[str]) -> list[Scores]:
    """The pairs of classes with the most mistakes, the most first; `share` is of the true class, in per cent."""
    wrong = matrix.clone().fill_diagonal_(0)
    most = wrong.flatten().topk(min(CONFUSIONS, wrong.numel()))
    pairs = [divmod(int(cell), len(matrix)) for cell in most.indices]
    return [
        {
            "true": class_names[true],
            "predicted": class_names[predicted],
            "images": int(images),
            "share": 100 * float(images / matrix[true].sum()),
        }
        for (true, predicted), images in zip(pairs, most.values, strict=True)
        if images
    ]
