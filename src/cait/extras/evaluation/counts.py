"""Counts beyond loss and accuracy: the confusion matrix, how sure the network is, accuracy on ReaL's labels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from cait.cli.evaluate import Scores
from cait.extras.evaluation.calibration import CalibrationError

CONFUSIONS = 20
"""Pairs of classes that are listed as the most confused."""
CLASSES_IN_MATRIX = 1000
"""With more classes the scores are without the confusion matrix."""


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
        self.real_acc1, self.real_acc5, self.real_images = MeanMetric(), MeanMetric(), SumMetric()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Those below 0 are not counted."""
        labels = labels.clamp(min=-1)
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

    def compute(self, class_names: list[str], with_real: bool) -> Scores:
        """The scores by name; the README lists them."""
        matrix = self.confusion.compute().cpu()
        unseen = matrix.any(dim=1) & ~matrix.any(dim=0)
        scores: Scores = {
            "confusions": _most_confused(matrix, class_names),
            "never_predicted": [class_names[i] for i in unseen.nonzero().flatten()],
            **self.calibration.compute(),
        }
        if len(matrix) <= CLASSES_IN_MATRIX:
            scores["confusion"] = matrix.tolist()
        if with_real:
            images = int(self.real_images.compute())
            right = {"acc1": self.real_acc1, "acc5": self.real_acc5}
            scores["real"] = {name: 100 * float(each.compute()) if images else None for name, each in right.items()}
            scores["real"]["images"] = images
        return scores


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
