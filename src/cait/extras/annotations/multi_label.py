"""The task of images that may have several classes: its loss, its metrics and its predictions."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score
from torchmetrics.utilities import dim_zero_cat

from cait.references import is_path
from cait.train.losses import Loss, LossSettings
from cait.train.metrics import Best, EvalMetrics, OneClass


class MultiLabel(OneClass):
    """Each class is a yes or no of its own; it is predicted above a probability of 0.5."""

    metric, several = "mAP", True
    metadata: ClassVar[dict[str, Any]] = {"multi_label": True}

    def loss(self, settings: LossSettings, data: Any = None) -> Loss:
        """The loss that the settings ask for; a class whose images are few counts more if there is a data module."""
        if is_path(settings.loss):
            return settings.build_loss()
        weights = None
        if data is not None:
            images = len(data.source.train)
            counts = torch.tensor(data.class_counts(), dtype=torch.float32)
            # a class on every image, or on none, counts as it is
            divides = (counts > 0) & (counts < images)
            weights = torch.where(divides, (images - counts) / counts.clamp(min=1), 1.0)
        return MultiLabelLoss(settings.label_smoothing, weights)

    def metrics(self, own: Mapping[str, str], per_class: bool) -> EvalMetrics:
        return MultiLabelMetrics(self.num_classes, own, per_class)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, num_classes] in float32."""
        return logits.float().sigmoid()

    def best(
        self, probabilities: Tensor, class_names: Sequence[str], top_k: int | None = None
    ) -> list[Best]:
        """The classes above 0.5, `top_k` at most, for each row of probabilities [B, num_classes]."""
        rows = super().best(probabilities, class_names, top_k or len(class_names))
        return [[best for best in row if best["probability"] > 0.5] for row in rows]


class MultiLabelLoss(nn.Module):
    """Binary cross entropy, a mean over images and classes; targets are shares [B, num_classes].

    The weights [num_classes] are of the positive part of each class; checkpoints do not hold them.
    """

    weights: Tensor | None

    def __init__(self, label_smoothing: float, weights: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothed = (1 - self.label_smoothing) * targets + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=self.weights)


class Answers(Metric):
    """The logits and the targets of all images, over all processes."""

    logits: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logits", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.logits.append(logits)
        self.targets.append(targets)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Both [N, num_classes]."""
        return dim_zero_cat(self.logits), dim_zero_cat(self.targets)


class MultiLabelMetrics(EvalMetrics):
    """Loss, mean average precision and macro F1 of a whole set, exact over several processes.

    mAP leaves out classes that no image has. `per_class` counts the images of a class, and those predicted to have it.
    """

    SIZE = "num_labels"

    def _make(self, num_classes: int) -> Metric:
        return Answers()

    def _standard(self) -> dict[str, Tensor]:
        logits, targets = self.counter.compute()
        probabilities, self._images = logits.sigmoid(), len(logits)
        hits = targets * (probabilities > 0.5)
        self.per_class = torch.stack([targets.sum(dim=0), hits.sum(dim=0)], dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without an image has no figure
            precision = multilabel_average_precision(
                probabilities, targets, logits.shape[1], average="none"
            )
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, targets.float()),
            "mAP": precision[targets.any(dim=0)].mean(),
            "f1": multilabel_f1_score(probabilities, targets, logits.shape[1]),
        }

    def by_class(self, names: Sequence[str]) -> dict[str, Any]:
        return super().by_class(names) | {"images": self._images}
