"""Distillation: what a frozen teacher adds to the training loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cait.errors import UserError

Distillation = Literal["none", "soft", "hard"]


def distillation_loss(logits: Tensor, teacher_logits: Tensor, kind: Distillation, tau: float = 1.0) -> Tensor:
    """The teacher's part of the loss, a mean over the batch, on logits [B, num_classes] of both.

    hard: cross entropy with the teacher's decision, CE(logits, argmax teacher).
    soft: τ² · KL(softmax(teacher / τ) ‖ softmax(logits / τ)). DeiT's code divides this by the number of
    classes too; here, as in timm and in Hinton's formula, it is the divergence of a picture.
    """
    logits, teacher_logits = logits.float(), teacher_logits.float()
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(dim=1))
    student, teacher = ((side / tau).log_softmax(dim=1) for side in (logits, teacher_logits))
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * tau**2


class Teacher(nn.Module):
    """A frozen network that judges the student's batches, under its own normalisation and at its own size.

    Args:
        network: images [B, 3, H, W] to logits [B, num_classes].
        mean: of the normalisation that the network was trained with.
        std: the same.
        img_size: side that the images are resized to; None leaves them at the student's.
        student_mean: of the normalisation that the images have had.
        student_std: the same.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        img_size: int | None,
        student_mean: Sequence[float],
        student_std: Sequence[float],
    ) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.img_size = img_size
        theirs, ours = (
            [torch.tensor(x).view(3, 1, 1) for x in pair] for pair in ((mean, std), (student_mean, student_std))
        )
        # ((x · std_s + mean_s) - mean_t) / std_t
        self.register_buffer("scale", ours[1] / theirs[1])
        self.register_buffer("shift", (ours[0] - theirs[0]) / theirs[1])
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        images = images * self.scale + self.shift
        if self.img_size is not None and images.shape[-1] != self.img_size:
            images = F.interpolate(images, size=(self.img_size,) * 2, mode="bicubic", antialias=True)
        return self.network(images)


def timm_teacher(
    name: str,
    path: str | None,
    num_classes: int,
    img_size: int | None,
    student_mean: Sequence[float],
    student_std: Sequence[float],
) -> Teacher:
    """One of timm's models with its published weights, or with those of the file `path`, as a teacher.

    `img_size` None means the student's resolution, or the model's own where it takes no other.

    Raises:
        UserError: timm has no such model, its weights cannot be had, or it knows other classes.
    """
    import timm

    overlay = {"file": path, "num_classes": num_classes} if path else None
    try:
        network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception as error:  # the hub's, the file's and the state dict's own errors
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise UserError(f"the teacher {name} cannot be loaded{' from ' + path if path else ''}: {reason}") from error
    if network.num_classes != num_classes:
        raise UserError(f"the teacher {name} knows {network.num_classes} classes, the data has {num_classes}")
    cfg = network.pretrained_cfg
    if img_size is None and cfg.get("fixed_input_size"):
        img_size = cfg["input_size"][-1]
    return Teacher(network, cfg["mean"], cfg["std"], img_size, student_mean, student_std)
