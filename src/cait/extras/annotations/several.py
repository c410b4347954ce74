"""The task of images that may have several classes: its loss, its metrics, and the thresholds of its predictions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, kl_divergence
from torchmetrics import Metric
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score
from torchmetrics.utilities import dim_zero_cat

from cait.references import is_path
from cait.train.losses import Distillation, Loss, LossSettings
from cait.train.metrics import Best, EvalMetrics


class MultiLabel(nn.Module):
    """Each class is a yes or no of its own, as `cait.train.metrics.OneClass` for one class an image.

    A class is predicted from its threshold on: the one with the highest F1 in the last validation of the training,
    0.5 before the first. Checkpoints hold the thresholds of the raw weights and those of their moving average.
    """

    several, trains, averaged = True, False, False
    val: Tensor
    val_ema: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        for name in ("val", "val_ema"):  # as the metrics of the two are logged
            self.register_buffer(name, torch.full((num_classes,), 0.5))

    @property
    def thresholds(self) -> Tensor:
        """The lowest probability [num_classes] with which a class is predicted."""
        return self.val_ema if self.averaged else self.val

    def loss(self, settings: LossSettings, data: Any = None) -> Loss:
        """The loss that the settings ask for; a class whose images are few counts more if there is a data module."""
        if is_path(settings.loss):
            return settings.build()
        weights = None
        if data is not None:
            images, counts = len(data.source.train), torch.tensor(data.class_counts(), dtype=torch.float32)
            weights = (images - counts) / counts.clamp(min=1)
        return MultiLabelLoss(settings.label_smoothing, weights)

    def distillation_loss(self, logits: Tensor, teacher_logits: Tensor, kind: Distillation, tau: float) -> Tensor:
        """The teacher's part of the loss, a mean over images and classes, on logits [B, num_classes] of both.

        hard: the binary cross entropy with the teacher's decision, p > 0.5.
        soft: τ² · KL(σ(teacher / τ) ‖ σ(logits / τ))
        """
        logits, teacher_logits = logits.float(), teacher_logits.float()
        if kind == "hard":
            return F.binary_cross_entropy_with_logits(logits, (teacher_logits > 0).float())
        teacher, student = Bernoulli(logits=teacher_logits / tau), Bernoulli(logits=logits / tau)
        return kl_divergence(teacher, student).mean() * tau**2

    def metrics(self, own: Mapping[str, str], per_class: bool) -> EvalMetrics:
        return MultiLabelMetrics(self, own, per_class)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, num_classes] in float32."""
        return logits.float().sigmoid()

    def best(self, probabilities: Tensor, class_names: Sequence[str], top_k: int | None = None) -> list[Best]:
        """The classes that reach their thresholds, `top_k` at most, for each row of probabilities [B, num_classes]."""
        predicted = (probabilities >= self.thresholds.to(probabilities.device)).tolist()
        order = probabilities.sort(dim=1, descending=True)
        found = []
        for hits, *row in zip(predicted, order.values.tolist(), order.indices.tolist(), strict=True):
            kept = [(p, i) for p, i in zip(*row, strict=True) if hits[i]][:top_k]
            found.append([{"class": class_names[i], "index": i, "probability": p} for p, i in kept])
        return found

    def metadata(self) -> dict[str, Any]:
        return {"multi_label": True, "thresholds": [round(value, 6) for value in self.thresholds.tolist()]}


class MultiLabelLoss(nn.Module):
    """Binary cross entropy, a mean over images and classes; targets are shares [B, num_classes].

    Args:
        label_smoothing: ε of (1 - ε) · target + ε / 2.
        weights: of the positive part of each class, [num_classes]; checkpoints do not hold them.
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
        self.targets.append(targets.float())

    def compute(self) -> tuple[Tensor, Tensor]:
        """Both [N, num_classes] in float32."""
        return dim_zero_cat(self.logits).float(), dim_zero_cat(self.targets).float()


class MultiLabelMetrics(EvalMetrics):
    """Loss, mean average precision and macro F1 of a whole set, exact over several processes.

    mAP leaves out classes that no image has. f1 is that of the task's thresholds; while the task trains, `compute`
    chooses them first. acc1 and acc5, in per cent, count the images with a class: at least one of the 1 or 5 most
    probable classes is right. `per_class` counts what the thresholds find.
    """

    SIZE = "num_labels"

    def __init__(self, task: MultiLabel, own: Mapping[str, str], per_class: bool) -> None:
        super().__init__(task.num_classes, own, per_class)
        self._task = [task]  # in a list, so that it does not become a part of this module
        self._found: dict[str, list[float]] = {}

    def _make(self, num_classes: int) -> Metric:
        return Answers()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits and labels [B, num_classes]; a row of labels below 0 is not counted."""
        counted = labels[:, 0] >= 0
        self._update(logits[counted].float(), labels[counted].long())

    def _standard(self, prefix: str) -> dict[str, Tensor]:
        task, (logits, targets) = self._task[0], self.counter.compute()
        probabilities, classes = task.probabilities(logits), task.num_classes
        thresholds: Tensor = getattr(task, prefix)
        if task.trains:
            thresholds.copy_(best_thresholds(probabilities, targets))
        hits, truth, present = (probabilities >= thresholds).long(), targets.long(), targets.any(dim=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without an image gets no figure
            precision = multilabel_average_precision(probabilities, truth, classes, average="none")
        f1 = multilabel_f1_score(hits, truth, classes, average="none")
        self.per_class = torch.stack([truth.sum(dim=0), (hits * truth).sum(dim=0)], dim=1)
        self._found = {"average_precision": precision.where(present, torch.nan).tolist(), "f1": f1.tolist()}
        self._found |= {"thresholds": thresholds.tolist()}
        self._images = len(logits)
        best = logits.topk(min(5, classes)).indices
        right = targets.gather(1, best)[targets.any(dim=1)]
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, targets),
            "acc1": 100 * right[:, 0].mean(),
            "acc5": 100 * right.amax(dim=1).mean(),
            "mAP": precision[present].mean(),
            "f1": f1.mean(),
        }

    def by_class(self, names: Sequence[str]) -> dict[str, Any]:
        """As in `EvalMetrics`, with each class's average precision, F1 and threshold under `multi_label`."""
        columns = {
            what: {name: None if value != value else value for name, value in zip(names, values, strict=True)}
            for what, values in self._found.items()
        }
        return super().by_class(names) | {"images": self._images, "multi_label": columns}


def best_thresholds(probabilities: Tensor, targets: Tensor) -> Tensor:
    """The threshold of each class [num_classes] with the highest F1 for [N, num_classes]; 0.5 without a positive.

    It lies half-way between two neighbouring probabilities. Of equal ones the highest is taken.
    """
    order = probabilities.double().sort(dim=0, descending=True, stable=True)
    found = targets.gather(0, order.indices).double().cumsum(dim=0)
    positives = found[-1:]
    counts = torch.arange(1, len(found) + 1, dtype=found.dtype, device=found.device)[:, None]
    following = torch.cat([order.values[1:], torch.zeros_like(order.values[:1])])
    f1 = (2 * found / (counts + positives)).masked_fill(order.values == following, -1)  # equal ones go together
    place = f1.argmax(dim=0, keepdim=True)
    middle = (order.values.gather(0, place) + following.gather(0, place)) / 2
    return middle.where(positives > 0, 0.5)[0].to(probabilities.dtype)
