"""Losses: of the labels, and of a teacher's judgment; their settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from cait import references
from cait.errors import UserError
from cait.settings import Group, Needs, PositiveFloat, Settings, Share, ShareBelow1

Distillation = Literal["none", "soft", "hard"]
Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, num_classes] and targets to a scalar. Targets are labels [B], or probabilities [B, num_classes]."""


class BinaryCrossEntropy(nn.Module):
    """Each class is a yes or no, as in DeiT III (arXiv 2204.07118): a mean over images and classes.

    For an image that is mixed from two, both classes count in full, whatever their shares.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        num_classes = logits.shape[1]
        present = targets > 0 if targets.ndim == 2 else F.one_hot(targets, num_classes)
        smoothed = (1 - self.label_smoothing) * present.to(
            logits.dtype
        ) + self.label_smoothing / num_classes
        return F.binary_cross_entropy_with_logits(logits, smoothed)


OF_LABELS = Needs("loss cross_entropy or bce", "loss", lambda loss: not references.is_path(loss))


@dataclass(frozen=True)
class LossSettings(Group):
    """The loss of the labels."""

    loss: str = "cross_entropy"
    """"cross_entropy", "bce" (`BinaryCrossEntropy`), or "package.module:factory" of something that is called without
    arguments and returns a `Loss`."""
    label_smoothing: Annotated[ShareBelow1, OF_LABELS] = 0.1
    """ε of (1 - ε) · target + ε / num_classes, for training only; not for a loss of your own."""
    class_weights: Annotated[Literal["balanced"] | None, OF_LABELS] = None
    """"balanced" weights the classes of images that may have several; None counts all alike. For one class per image
    there is `data.balance`."""

    def build_loss(self) -> Loss:
        """Build the loss. Raises UserError if there is no such loss."""
        if self.loss == "cross_entropy":
            return nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)
        if self.loss == "bce":
            return BinaryCrossEntropy(self.label_smoothing)
        if not references.is_path(self.loss):
            raise UserError(
                f"unknown loss {self.loss!r}; choose cross_entropy, bce or package.module:factory"
            )
        return references.made(self.loss)


def parameters_behind(loss: Tensor, logits: Tensor) -> list[Tensor]:
    """The parameters that a loss of these logits depends on beside them, whatever holds them."""
    parameters = []
    seen: set[Any] = {None, logits.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            parameters.append(node.variable)
        waiting += [operand for operand, _ in node.next_functions]
    return parameters


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, kind: Distillation, tau: float = 1.0
) -> Tensor:
    """The teacher's part of the loss, a mean over the batch, on logits [B, num_classes] of both.

    hard: CE(logits, argmax teacher), the cross entropy with the teacher's decision.
    soft: τ² · KL(softmax(teacher / τ) ‖ softmax(logits / τ)), as in timm; DeiT's code also divides by the classes.
    """
    if kind == "hard":
        return F.cross_entropy(logits.float(), teacher_logits.argmax(dim=1))
    student = (logits.float() / tau).log_softmax(dim=1)
    teacher = (teacher_logits.float() / tau).log_softmax(dim=1)
    return tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


TAUGHT = Needs("distillation", "distillation", lambda distillation: distillation != "none")
TAUGHT_BY_TIMM = Needs(
    "distillation from a teacher of timm's",
    "distillation teacher",
    lambda distillation, teacher: distillation != "none" and not teacher.endswith(".ckpt"),
)


@dataclass(frozen=True)
class DistillationSettings(Group):
    """Whether and how the student learns from a teacher."""

    distillation: Distillation = "none"
    """"hard" or "soft" adds a teacher to the loss; see `cait.train.losses.distillation_loss`."""
    distillation_alpha: Annotated[Share, TAUGHT] = 0.5
    """α, the teacher's share of the loss."""
    distillation_tau: Annotated[
        PositiveFloat,
        Needs("distillation soft", "distillation", lambda distillation: distillation == "soft"),
    ] = 1.0
    """τ, the temperature of soft distillation."""
    teacher: Annotated[str, TAUGHT] = "regnety_160.deit_in1k"
    """A checkpoint (.ckpt) of a run, or a network of timm's, with or without "timm/"."""
    teacher_path: Annotated[str | None, TAUGHT_BY_TIMM] = None
    """File with the weights of timm's network; None takes the published ones."""
    teacher_fields: Annotated[Settings | None, TAUGHT_BY_TIMM] = None
    """Further arguments of timm's network."""

    @property
    def distills(self) -> bool:
        return self.distillation != "none"

    def distilled_loss(self, label_loss: Tensor, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """(1 - α) · `label_loss` + α · the teacher's loss, on logits [B, num_classes] of both."""
        alpha = self.distillation_alpha
        teacher_loss = distillation_loss(
            logits, teacher_logits, self.distillation, self.distillation_tau
        )
        return (1 - alpha) * label_loss + alpha * teacher_loss
