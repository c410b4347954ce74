"""The teacher of distillation: a frozen network with its own normalization and size."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cait import ckpt, disk, references, signature
from cait.errors import UserError, abbreviate, one_line, told_as
from cait.model.network import NetworkSettings, at_most, in_channels_last
from cait.model.weights import HEAD_ANEW, load_weights
from cait.references import TIMM
from cait.settings import group
from cait.train.losses import DistillationSettings

Normalization = Sequence[Sequence[float]]
"""Mean and deviation of images, for each channel."""
HYPER_PARAMETERS = ckpt.NETWORK | {"mean": [(int, float)], "std": [(int, float)]}
"""Those of a run that teaches; see `cait.disk.check_shape`."""


class Teacher(nn.Module):
    """A frozen network that judges the student's batches, under its own normalization and at its own size.

    Args:
        network: images [B, C, H, W] to logits [B, num_classes].
        own: of the images that the network was trained with.
        img_size: side that the images are resized to; None leaves them at the student's.
        students: of the images that it judges. A network for RGB sees gray images in all three channels.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, network: nn.Module, own: Normalization, img_size: int | None, students: Normalization
    ) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.img_size = img_size
        mean_t, std_t, mean_s, std_s = (
            torch.tensor(values).view(-1, 1, 1) for values in (*own, *students)
        )
        # ((x · std_s + mean_s) - mean_t) / std_t
        self.register_buffer("scale", std_s / std_t)
        self.register_buffer("shift", (mean_s - mean_t) / std_t)
        self.eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The student's images [B, C, S, S] to logits [B, num_classes]."""
        images = images.to(self.scale.dtype) * self.scale + self.shift
        if self.img_size is not None and images.shape[-1] != self.img_size:
            images = F.interpolate(
                images, size=(self.img_size,) * 2, mode="bicubic", antialias=True
            )
        return self.network(images)


class Judge(NamedTuple):
    """A teacher's network, and how it takes images."""

    network: nn.Module
    num_classes: int
    img_size: int | None
    """None means any."""
    normalization: Normalization


def load_teacher(
    settings: DistillationSettings,
    student: NetworkSettings,
    students: Normalization,
    classes: Sequence[str] | None = None,
) -> Teacher:
    """Load a student's teacher with its weights, for images that have had the student's normalization.

    It sees the images at the student's size, or at its own where it takes no other. A run must know the classes of the
    data by name, in any order; of timm's network only their number is compared. Raises UserError if there is no such
    teacher, its weights cannot be loaded, or it knows other classes.
    """
    name = settings.teacher
    if name.endswith(".ckpt"):
        judge = _load_run(name, student.name, classes or ())
    else:
        judge = _load_timm(settings, student.num_classes)
    channels = len(students[0])
    wanted = len(judge.normalization[0])
    if channels != wanted and (channels, wanted) != (1, 3):
        raise UserError(
            f"the teacher {name} takes {wanted} channels, the student {channels}: "
            f"give the student --model.fields.in_chans {wanted}"
        )
    if judge.num_classes != student.num_classes:
        raise UserError(
            f"the teacher {name} knows {judge.num_classes} classes, the data has {student.num_classes}"
        )
    teacher = Teacher(judge.network, judge.normalization, judge.img_size, students)
    size = student.img_size or 32
    with told_as(f"the teacher {name} fails on images of the student"):
        teacher(torch.zeros(1, channels, size, size))
    return teacher


def _load_run(path: str, student: str, classes: Sequence[str]) -> Judge:
    """The network of a run, with the weights that chose its checkpoint, in the order of `classes`."""
    checkpoint = ckpt.read_checkpoint(path)
    hparams = checkpoint.get("hyper_parameters", {})
    disk.check_shape(hparams, HYPER_PARAMETERS, Path(path), "hyper_parameters")
    if hparams.get("task"):
        raise UserError(f"the teacher {path} gives an image several classes, the data one")
    module, *answers = checkpoint.get(ckpt.MODULE) or [""]
    if answers:
        raise UserError(
            f"the teacher {path} answers by {' and '.join(answers)} of {module}: only networks alone teach"
        )
    name = hparams["name"]
    signed = signature.own_text(Path(path).absolute().parents[1])
    if references.is_path(name) and name not in (student, *references.PATH.findall(signed)):
        raise UserError(
            f"the teacher {path} is code, {name}, and of no run of yours: only such runs teach"
        )
    names = ckpt.class_names(checkpoint)
    others = {*names} ^ {*classes} if names and classes else ()
    if others:
        raise UserError(
            f"the teacher {path} knows other classes than the data: {abbreviate(sorted(others))}"
        )
    try:
        with at_most(ckpt.weights(checkpoint), hparams):
            network = group(NetworkSettings, hparams).build_network()
        if HEAD_ANEW in load_weights(network, path, own_classes=classes):
            raise UserError("it has no head")
    except (UserError, RuntimeError) as error:
        raise UserError(f"the teacher {path} cannot be loaded: {error}") from error
    return Judge(
        network, hparams["num_classes"], hparams["img_size"], (hparams["mean"], hparams["std"])
    )


def _load_timm(settings: DistillationSettings, num_classes: int | None) -> Judge:
    """timm's network, with published weights or those of `teacher_path`."""
    import timm

    name = settings.teacher.removeprefix(TIMM)
    path = settings.teacher_path
    fields = settings.teacher_fields or {}
    if not timm.is_model(name) and Path(name).is_dir():
        raise UserError(
            f"the teacher {name} is a folder: name a checkpoint of a run, as checkpoints/best.ckpt in it"
        )
    weights = {"file": path, "num_classes": num_classes} if path else None
    try:
        network = timm.create_model(
            name, **fields | dict(pretrained=True, pretrained_cfg_overlay=weights)
        )
    except Exception as error:  # the hub's, the file's and the state dict's own errors
        reason = one_line(" ".join(str(error).splitlines()[:2])) or type(error).__name__
        raise UserError(
            f"the teacher {name} cannot be loaded from {path or 'the hub'}: {reason}"
        ) from error
    config = network.pretrained_cfg
    size = fields.get("img_size")
    if config.get("fixed_input_size") and not (size or fields.get("dynamic_img_size")):
        size = config["input_size"][-1]
    return Judge(
        in_channels_last(network), network.num_classes, size, (config["mean"], config["std"])
    )
