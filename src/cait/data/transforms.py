"""What is done to pixels: the settings, checked, and the transforms that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from torch import Tensor
from torchvision.transforms import Compose

from cait.data.augment import Augment, OwnOperation, simple_crop
from cait.data.decode import Decoder
from cait.data.reading import AS_SEEN, Reading
from cait.errors import UserError
from cait.settings import Settings, check_at_least, check_choice, check_share, values

TrainCrop = Literal["resized", "simple"]
MixMode = Literal["batch", "pair", "elem"]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input.

    Raises:
        UserError: a setting is out of range.
    """

    img_size: int = 224
    """Side of the square images in pixels."""
    interpolation: str = "bicubic"
    """timm's name of the resampling filter, for training and evaluation."""
    crop_pct: float = 1.0
    """Evaluation resizes the shorter side to img_size / crop_pct, then crops the centre."""
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    """Mean for the normalisation, for each channel, of pixels in [0, 1]."""
    std: Sequence[float] = IMAGENET_DEFAULT_STD
    """Standard deviation for the normalisation, likewise."""
    reading: Reading = AS_SEEN

    def __post_init__(self) -> None:
        check_choice(self, {"interpolation": INTERPOLATIONS})
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        mean, std = list(self.mean), list(self.std)
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise UserError(f"mean and std take three numbers each, std above 0; got {mean} and {std}")

    def settings(self) -> Settings:
        """All of it as the data module's settings, in plain values; `cait.settings.group` reads them."""
        return values(self) | {"mean": list(self.mean), "std": list(self.std)}

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
    """How training images are augmented.

    Raises:
        UserError: a setting is out of range, or timm does not know the policy.
    """

    train_crop: TrainCrop = "resized"
    """"resized" is a random crop resized to the image size. "simple" is DeiT III's simple random crop: the shorter side
    resized, 4 pixels of reflection added around, a random square cut out."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the area of the "resized" crop, as a share of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the aspect ratio (width / height) of the "resized" crop."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's policy string, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (DeiT III's ThreeAugment: grey,
    solarised or blurred; there with color_jitter 0.3). None turns it off."""
    augment_ops: list[str] | None = None
    """Augmentation operations of your own, as "package.module:function". Each takes and returns a PIL image of the
    crop's size, after auto_augment. A run stays exact if they draw only from the global generators of `random`, numpy
    and torch, which are seeded for each image."""
    color_jitter: float | Sequence[float] | None = None
    """Strength of brightness, contrast and saturation jitter, or three numbers, one for each, and a fourth of at most
    0.5 for the hue. As in timm it is used only after "3a" or without auto_augment."""
    erase_prob: float = 0.25
    """Probability of erasing a box of pixels."""

    def __post_init__(self) -> None:
        check_choice(self, {"train_crop": get_args(TrainCrop)})
        check_share(self, "hflip", "erase_prob")
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


@dataclass(frozen=True)
class Mixing:
    """Mixup and CutMix of a training batch, as timm does them.

    Raises:
        UserError: a setting is out of range.
    """

    mixup: float = 0.8
    """Alpha of Mixup's beta distribution; 0 turns it off."""
    cutmix: float = 1.0
    """Alpha of CutMix's beta distribution; 0 turns it off."""
    mix_prob: float = 1.0
    """Probability that a batch (a pair, an image) is mixed at all."""
    mix_switch_prob: float = 0.5
    """Probability of CutMix if both are on."""
    mix_mode: MixMode = "batch"
    """One draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of a batch of B is
    always mixed with image B - 1 - i."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "mixup", "cutmix")
        check_choice(self, {"mix_mode": get_args(MixMode)})
        check_share(self, "mix_prob", "mix_switch_prob")

    @property
    def is_on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mix [B, 3, S, S] and labels [B] into images of the same shape and probabilities [B, num_classes].

        Label smoothing is left to the loss. It is linear, so smoothing mixed labels gives what timm gets by
        mixing smoothed ones.
        """
        np.random.seed(seed)  # timm draws from numpy's global generator
        mixup = Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.mix_prob,
            switch_prob=self.mix_switch_prob,
            mode=self.mix_mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )
        return mixup(images, labels)
