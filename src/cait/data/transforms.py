"""The transforms of training and evaluation, built from a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import Compose

from cait.data.augment import Augment, OwnOperation, simple_crop
from cait.data.decode import Decoder, choose
from cait.data.folder import AS_SEEN, Reading
from cait.errors import UserError

TrainCrop = Literal["resized", "simple"]
Backend = Literal["auto", "nvimgcodec", "torchvision", "pillow", "timm"]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input; the fields are `cait.data.datamodule.ImageNetDataModule`'s settings.

    Raises:
        UserError: a setting is out of range.
    """

    img_size: int
    interpolation: str
    crop_pct: float
    mean: Sequence[float]
    std: Sequence[float]
    reading: Reading = AS_SEEN

    def __post_init__(self) -> None:
        self.reading.check()
        if self.interpolation not in INTERPOLATIONS:
            raise UserError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {self.interpolation!r}")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        mean, std = list(self.mean), list(self.std)
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise UserError(f"mean and std take three numbers each, std above 0; got {mean} and {std}")

    def settings(self) -> dict[str, Any]:
        """All of it as the data module's settings, in plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "reading"}
        return values | {"mean": list(self.mean), "std": list(self.std)} | self.reading._asdict()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Preprocessing:
        """The `Preprocessing` whose `settings()` these are."""
        reading = Reading(**{name: settings[name] for name in Reading._fields if name in settings})
        return cls(**{name: value for name, value in settings.items() if name not in Reading._fields}, reading=reading)

    def transform(self) -> Compose:
        """timm's evaluation transform, from a PIL image to uint8 [3, img_size, img_size]."""
        return create_transform(is_training=False, crop_pct=self.crop_pct, normalize=False, **self.timms())

    def crop_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of what `transform` keeps, in the pixels of an image of width × height."""
        shorter, resized_shorter = min(width, height), math.floor(self.img_size / self.crop_pct)
        ends = []
        for side in (width, height):
            resized = int(resized_shorter * side / shorter)
            start = round((resized - self.img_size) / 2)
            ends.append((start * side / resized, (start + self.img_size) * side / resized))
        (left, right), (top, bottom) = ends
        return left, top, right, bottom

    def denormalized(self, image: Tensor) -> np.ndarray:
        """A network's input [3, S, S] as the pixels that it was made of, uint8 [S, S, 3]."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        pixels = (image.float().cpu() * std + mean) * 255
        return pixels.round().clamp(0, 255).byte().permute(1, 2, 0).numpy()

    def timms(self) -> dict[str, Any]:
        """Arguments of timm's `create_transform` that training and evaluation share."""
        size = (3, self.img_size, self.img_size)
        return dict(input_size=size, interpolation=self.interpolation, mean=tuple(self.mean), std=tuple(self.std))


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented; the fields are `cait.data.datamodule.ImageNetDataModule`'s settings.

    Raises:
        UserError: a setting is out of range, or timm does not know the policy.
    """

    train_crop: TrainCrop
    scale: tuple[float, float]
    ratio: tuple[float, float]
    hflip: float
    auto_augment: str | None
    augment_ops: Sequence[str] | None
    color_jitter: float | Sequence[float] | None
    erase_prob: float

    def __post_init__(self) -> None:
        if self.train_crop not in get_args(TrainCrop):
            raise UserError(f"train_crop must be one of {', '.join(get_args(TrainCrop))}, got {self.train_crop!r}")
        check_probability("hflip", self.hflip)
        check_probability("erase_prob", self.erase_prob)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UserError(
                f"scale must be two shares above 0 and at most 1, the smaller first, got {list(self.scale)}"
            )
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UserError(f"ratio must be two numbers above 0, the smaller first, got {list(self.ratio)}")
        self._check_color_jitter()
        try:
            create_transform(224, is_training=True, **self._timms())
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"bad augmentation settings (auto_augment {self.auto_augment!r}): {error}") from error

    def _check_color_jitter(self) -> None:
        jitter, policy = self.color_jitter, self.auto_augment
        if isinstance(jitter, Sequence):
            in_range = len(jitter) in (3, 4) and min(jitter) >= 0 and max(jitter[3:], default=0) <= 0.5
        else:
            in_range = jitter is None or jitter >= 0
        if not in_range:
            raise UserError(
                "color_jitter must be a number of at least 0, or three, or four with the last, "
                f"for the hue, at most 0.5; got {jitter}"
            )
        if jitter is not None and policy and "3a" not in policy:
            rank_zero_info(f"color_jitter {jitter} is left out beside auto_augment {policy}, as in timm")

    def transform(self, preprocessing: Preprocessing, backend: Decoder | Literal["timm"]) -> Augment | Compose:
        """The training transform: timm's own, or ours, which decodes with `backend`.

        Raises:
            UserError: one of `augment_ops` cannot be imported.
        """
        settings = preprocessing.timms() | self._timms()
        simple, own_ops = self.train_crop == "simple", [OwnOperation(path) for path in self.augment_ops or ()]
        if backend != "timm":
            return Augment(backend, preprocessing.reading, simple, own_ops, **settings)
        stages = create_transform(is_training=True, separate=True, **settings)
        first, policy, final = (stage.transforms for stage in stages)
        if simple:
            first[:1] = simple_crop(preprocessing.img_size, preprocessing.interpolation)
        return Compose([*first, *policy, *own_ops, *final])

    def _timms(self) -> dict[str, Any]:
        return dict(
            scale=self.scale,
            ratio=self.ratio,
            hflip=self.hflip,
            auto_augment=self.auto_augment,
            color_jitter=self.color_jitter,
            re_prob=self.erase_prob,
            re_mode="pixel",
        )


def choose_backend(wanted: Backend) -> Decoder | Literal["timm"]:
    """What reads the training images; "auto" is the fastest decoder that works here.

    Raises:
        UserError: there is no such backend, or it does not work here.
    """
    if wanted not in get_args(Backend):
        raise UserError(f"backend must be one of {', '.join(get_args(Backend))}, got {wanted!r}")
    return "timm" if wanted == "timm" else choose(wanted)


def check_probability(name: str, value: float) -> None:
    """Raises UserError for a value outside [0, 1]."""
    if not 0 <= value <= 1:
        raise UserError(f"{name} must be in [0, 1], got {value}")
