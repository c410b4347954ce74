"""What the labels of an image are: here one class. An extra may bring another task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cait import plugins
from cait.errors import UserError
from cait.train.losses import Distillation, Loss, LossSettings, distillation_loss
from cait.train.metrics import EvalMetrics

Best = list[dict[str, Any]]
"""The classes of an image, the most probable first: {"class": name, "index": number, "probability": p}"""


class OneClass:
    """Each image has one class, and the probabilities of its classes add up to one."""

    several = False
    """Whether an image may have any number of classes, with targets [B, num_classes] of 0 and 1."""
    trains = False
    """Whether the network trains, so that what predictions depend on may be chosen in validation."""
    averaged = False
    """Whether predictions are of the moving average of the weights."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def loss(self, settings: LossSettings, data: Any = None) -> Loss:
        """The loss that the settings ask for, with the weights of the classes of a data module if there is one."""
        return settings.build() if data is None else settings.weighted(data.class_counts())

    def distillation_loss(self, logits: Tensor, teacher_logits: Tensor, kind: Distillation, tau: float) -> Tensor:
        """The teacher's part of the loss, see `cait.train.losses.distillation_loss`."""
        return distillation_loss(logits, teacher_logits, kind, tau)

    def metrics(self, own: Mapping[str, str], per_class: bool) -> EvalMetrics:
        """The metrics of a validation, the user's `own` among them."""
        return EvalMetrics(self.num_classes, own, per_class)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, num_classes] in float32."""
        return logits.float().softmax(dim=1)

    def best(self, probabilities: Tensor, class_names: Sequence[str], top_k: int | None = None) -> list[Best]:
        """The `top_k` most probable classes for each row of probabilities [B, num_classes]; None means 5."""
        best = probabilities.topk(min(top_k or 5, probabilities.shape[1]))
        return [
            [{"class": class_names[i], "index": i, "probability": p} for p, i in zip(values, indices, strict=True)]
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def metadata(self) -> dict[str, Any]:
        """What a reader of an exported network has to know beyond the classes' names."""
        return {}


def build(name: str | None, num_classes: int) -> Any:
    """The task of a name; None is `OneClass`. Raises UserError if no extra has it."""
    tasks = plugins.merged("TASKS")
    if name is not None and name not in tasks:
        raise UserError(f"the network's task is {name}, which needs an extra that is not here")
    return plugins.load(tasks[name])(num_classes) if name else OneClass(num_classes)
