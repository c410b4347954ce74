"""What is done to pixels: the settings, checked, and the transforms that they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms import Compose
from torchvision.transforms.functional import crop, get_dimensions

from cait.data.reading import RawImage, Reading, load_image
from cait.errors import UserError
from cait.references import locate
from cait.settings import Group, In, Needs, NonNegativeFloat, OneOf, PositiveInt, Settings, Share

Fit = Literal["crop", "pad", "squash"]
CROP_MODES: dict[Fit, str] = {"crop": "center", "pad": "border", "squash": "squash"}  # timm's names
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
GREY = {IMAGENET_DEFAULT_MEAN: [0.458971], IMAGENET_DEFAULT_STD: [0.225609]}
"""ImageNet's mean and deviation as one number: 0.299 of red's, 0.587 of green's and 0.114 of blue's, as in gray."""
Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box that it fills: top, left, height, width in pixels"""


@dataclass(frozen=True)
class Preprocessing(Reading):
    """How an image becomes the network's input."""

    img_size: PositiveInt = 224
    """Side of the square images in pixels."""
    interpolation: Annotated[str, OneOf(INTERPOLATIONS)] = "bicubic"
    """timm's name of the resampling filter, for training and evaluation."""
    crop_pct: Annotated[float, In("(0, 1]")] = 1.0
    """Evaluation resizes the shorter side to img_size / crop_pct, then crops the center."""
    fit: Fit = "crop"
    """How an image that is not square becomes square, in training and evaluation. "pad" resizes the longer side to
    img_size / crop_pct and puts the color `mean` around, "squash" resizes both sides."""
    mean: Annotated[Sequence[float], In("(-inf, inf)")] = IMAGENET_DEFAULT_MEAN
    """Mean for the normalization, for each channel, of pixels in [0, 1]; for gray images one number, or three alike."""
    std: Annotated[Sequence[float], In("(0, inf)")] = IMAGENET_DEFAULT_STD
    """Standard deviation for the normalization, given as `mean` is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            object.__setattr__(self, name, self._by_channel(getattr(self, name)))
        channels = self.channels
        lengths = {len(self.mean), len(self.std)}
        if lengths != {channels}:
            numbers = {1: "one number", 3: "three numbers"}.get(channels, f"{channels} numbers")
            raise UserError(f"mean and std take {numbers} each; got {self.mean} and {self.std}")

    def _by_channel(self, numbers: Sequence[float]) -> list[float]:
        """A number for each channel; for gray images one that stands for ImageNet's three, or for three alike."""
        if self.channels > 1:
            return list(numbers)
        numbers = GREY.get(tuple(numbers), list(numbers))
        return numbers[:1] if len(set(numbers)) == 1 else numbers

    def transform(self) -> Compose:
        """timm's evaluation transform, from a PIL image to uint8 [3, S, S]."""
        transform: Compose = create_transform(
            is_training=False,
            crop_pct=self.crop_pct,
            crop_mode=CROP_MODES[self.fit],
            normalize=False,
            **self.timms(),
        )
        if self.fit == "pad":
            transform.transforms[0].get_params = size_to_pad
        return transform

    def train_transform(self, augmentation: "Augmentation") -> Compose:
        """timm's training transform, from a PIL image to float32 [C, img_size, img_size], normalized."""
        stages = create_transform(
            is_training=True, separate=True, **self.timms(), **augmentation.timms_augmentation()
        )
        first, policy, final = (stage.transforms for stage in stages)
        if self.fit != "crop":
            # what makes the image square, without the conversion to a tensor
            squared = replace(self, crop_pct=1.0).transform().transforms[-3:-1]
            first[:1] = [ShapedCrop(augmentation.scale, augmentation.ratio), *squared]
        if len(self.mean) == 1:
            final.insert(2, itemgetter(slice(1)))  # normalized, one of gray's equal three
        return Compose([*first, *policy, *augmentation.own_operations(), *final])

    def open(self, raw: RawImage, name: str, whole: bool) -> Any:
        """Open an image for the transforms, for one crop or `whole`."""
        return load_image(raw, name, self)

    def timms(self) -> Settings:
        """Arguments of timm's `create_transform` that training and evaluation share."""
        repeats = 3 // len(self.mean)  # gray is still in RGB
        return dict(
            input_size=(3, self.img_size, self.img_size),
            interpolation=self.interpolation,
            mean=tuple(self.mean) * repeats,
            std=tuple(self.std) * repeats,
        )


@dataclass(frozen=True)
class Augmentation(Group):
    """How training images are augmented."""

    scale: Annotated[tuple[float, float], In("(0, 1]")] = (0.08, 1.0)
    """Range of the area of the random crop, as a share of the image."""
    ratio: Annotated[tuple[float, float], In("(0, inf)")] = (3 / 4, 4 / 3)
    """Range of the aspect ratio (width / height) of the random crop, before it is made square as `fit` says."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's policy string, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (DeiT III's ThreeAugment: gray,
    solarized or blurred; there with color_jitter 0.3). None turns it off."""
    augment_ops: list[str] | None = None
    """Augmentation operations of your own, as "package.module:function". Each takes and returns a PIL image in RGB of
    the crop's size, of planes a normalized tensor, after auto_augment. A run stays exact if they draw only from the
    global generators of `random`, numpy and torch, which are seeded for each image."""
    color_jitter: Annotated[
        float | Sequence[float] | None,
        In("[0, inf)"),
        Needs(
            "auto_augment 3a or null",
            "auto_augment",
            lambda policy: not policy or policy.startswith("3a"),
        ),
    ] = None
    """Strength of brightness, contrast and saturation jitter, or three numbers, one for each, and a fourth of at most
    0.5 for the hue. As in timm it is used only after "3a" or without auto_augment."""
    erase_prob: Share = 0.25
    """Probability of erasing a box of pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "ratio"):
            limits = list(getattr(self, name))
            if limits != sorted(limits):
                raise UserError(f"{name} is a range, the smaller first, got {limits}")
        try:
            create_transform(224, is_training=True, **self.timms_augmentation())
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(
                f"bad augmentation settings (auto_augment {self.auto_augment!r}): {error}"
            ) from error

    def own_operations(self) -> list[Callable[[Image.Image], Image.Image]]:
        """What `augment_ops` names. Raises UserError if one of them cannot be imported."""
        return [partial(apply_own, path, locate(path)) for path in self.augment_ops or ()]

    def timms_augmentation(self) -> Settings:
        """Arguments of timm's `create_transform` that training alone has."""
        return dict(
            scale=self.scale,
            ratio=self.ratio,
            hflip=self.hflip,
            auto_augment=self.auto_augment,
            color_jitter=self.color_jitter,
            re_prob=self.erase_prob,
            re_mode="pixel",
        )


def apply_own(path: str, operation: Callable[[Any], Any], image: Any) -> Any:
    """Apply an augmentation of the user's own. Raises UserError if it makes an image of another type."""
    augmented = operation(image)
    if _type(augmented) != _type(image):
        raise UserError(
            f"the augmentation {path} must return {_type(image)}, as it gets, not {_type(augmented)}"
        )
    return augmented


def _type(image: Any) -> str:
    return (
        f"an image in {image.mode} of {image.size}"
        if isinstance(image, Image.Image)
        else type(image).__name__
    )


def size_to_pad(image: Any, *target: Any) -> list[int]:
    """timm's (height, width) of an image that is padded, but at least a pixel: timm rounds a thin image's to none."""
    return [max(1, side) for side in ResizeKeepRatio.get_params(image, *target)]


@dataclass(frozen=True)
class ShapedCrop:
    """The random crop of `fit` pad and squash: its aspect ratio is the image's own times one of the range `ratio`.

    So a crop of the whole image, scale 1 and ratio 1, is what evaluation sees, and pad crops no padding.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """(top, left, height, width) in pixels, as timm draws them in a square that is then stretched."""
        side = max(width, height)
        top, left, rows, columns = RandomResizedCropAndInterpolation.get_params(
            torch.empty(side, side, device="meta"), self.scale, self.ratio
        )
        return (
            top * height // side,
            left * width // side,
            max(1, round(rows * height / side)),
            max(1, round(columns * width / side)),
        )

    def __call__(self, image: Any) -> Any:
        _, height, width = get_dimensions(image)
        return crop(image, *self.box(width, height))


class NormalizeAndErase:
    """Finish a batch on its device: float32, normalized, boxes filled with noise.

    Mean and standard deviation are for each channel, of pixels in [0, 1]; one number keeps the first of them.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor, erased: Sequence[tuple[int, Erased]] = ()) -> Tensor:
        """uint8 [B, S, S, 3] to float32 [B, C, S, S].

        `erased` are pairs (index in the batch, box); each box has noise of its own seed, whatever the batch.
        """
        device = images.device
        if self.mean.device != device:  # once: the copy waits for the device
            self.mean, self.std = self.mean.to(device), self.std.to(device)
        images = images.permute(0, 3, 1, 2)[:, : len(self.mean)]
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        images.div_(255).sub_(self.mean).div_(self.std)
        noise = torch.Generator(device)
        for index, (seed, top, left, height, width) in erased:
            noise.manual_seed(seed)
            box = images[index, :, top : top + height, left : left + width]
            box.copy_(torch.randn(box.shape, generator=noise, device=device))
        return images


MIXED = Needs("Mixup or CutMix", "mixup cutmix", lambda *alphas: any(alphas))


@dataclass(frozen=True)
class Mixing(Group):
    """Mixup and CutMix of a training batch, as timm does them."""

    mixup: NonNegativeFloat = 0.8
    """Alpha of Mixup's beta distribution; 0 turns it off."""
    cutmix: NonNegativeFloat = 1.0
    """Alpha of CutMix's beta distribution; 0 turns it off."""
    mix_prob: Annotated[Share, MIXED] = 1.0
    """Probability that a batch (a pair, an image) is mixed at all."""
    mix_switch_prob: Annotated[Share, Needs("both Mixup and CutMix", "mixup cutmix")] = 0.5
    """Probability of CutMix if both are on."""
    mix_mode: Annotated[Literal["batch", "pair", "elem"], MIXED] = "batch"
    """One draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of a batch of B is
    always mixed with image B - 1 - i."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def mix(
        self, images: Tensor, labels: Tensor, num_classes: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Mix [B, C, S, S] and labels [B] into images of the same shape and probabilities [B, num_classes].

        Labels [B, num_classes] of several classes per image are mixed in the same shares.
        Label smoothing is left to the loss. It is linear, so smoothing mixed labels gives what timm gets by
        mixing smoothed ones.
        """
        # mix the numbers of the images, and so learn the share of each in each
        if labels.ndim == 2:
            images, shares = self.mix(
                images, torch.arange(len(labels), device=labels.device), len(labels), seed
            )
            return images, shares @ labels
        np.random.seed(seed)  # timm draws from numpy's global generator
        return Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.mix_prob,
            switch_prob=self.mix_switch_prob,
            mode=self.mix_mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )(images, labels)
