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
from cait.settings import Group, In, Needs, OneOf

Fit = Literal["crop", "pad", "squash"]
CROP_MODES: dict[Fit, str] = {"crop": "center", "pad": "border", "squash": "squash"}  # timm's names
FOR_PLANES = ("nearest", "bilinear", "bicubic")
"""Filters that torch has, which resizes planes."""
INTERPOLATIONS = (*FOR_PLANES, "box", "hamming", "lanczos")
GREY = {IMAGENET_DEFAULT_MEAN: [0.458971], IMAGENET_DEFAULT_STD: [0.225609]}
"""ImageNet's mean and deviation as one number: 0.299 of red's, 0.587 of green's and 0.114 of blue's, as in gray."""
Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box that it fills: top, left, height, width in pixels"""


@dataclass(frozen=True)
class Preprocessing(Reading):
    """How an image becomes the network's input."""

    img_size: Annotated[int, In("[1, inf)")] = 224
    """Side of the square images in pixels."""
    interpolation: Annotated[str, OneOf(INTERPOLATIONS)] = "bicubic"
    """timm's name of the resampling filter, for training and evaluation."""
    crop_pct: Annotated[float, In("(0, 1]")] = 1.0
    """Evaluation resizes the shorter side to img_size / crop_pct, then crops the center."""
    fit: Fit = "crop"
    """How an image that is not square becomes square, in training and evaluation. "pad" resizes the longer side to
    img_size / crop_pct and puts the color `mean` around, "squash" resizes both sides."""
    mean: Annotated[Sequence[float], In("(-inf, inf)")] = IMAGENET_DEFAULT_MEAN
    """Mean for the normalization, for each channel, of pixels in [0, 1]; for gray images one number, or three alike.
    Planes are as their reader makes them."""
    std: Annotated[Sequence[float], In("(0, inf)")] = IMAGENET_DEFAULT_STD
    """Standard deviation for the normalization, given as `mean` is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reader:
            OneOf(FOR_PLANES).check("interpolation", self.interpolation)
        is_gray = self.in_chans == 1
        mean = as_gray(self.mean) if is_gray else [*self.mean]
        std = as_gray(self.std) if is_gray else [*self.std]
        channels = self.in_chans if self.reader or is_gray else 3
        if {len(mean), len(std)} != {channels}:
            numbers = {1: "one number", 3: "three numbers"}.get(channels, f"{channels} numbers")
            raise UserError(f"mean and std take {numbers} each; got {mean} and {std}")
        vars(self).update(mean=mean, std=std)

    def transform(self) -> Compose:
        """timm's evaluation transform, from a PIL image to uint8 [3, S, S], or planes to normalized float32."""
        how: dict[str, Any] = dict(crop_pct=self.crop_pct, crop_mode=CROP_MODES[self.fit], normalize=False)
        transform: Compose = create_transform(is_training=False, **how, **self.timms())
        if self.fit == "pad":
            resize, pad = transform.transforms[:2]
            resize.get_params, pad.fill = size_to_pad, 0 if self.first else pad.fill
        return Compose([*self.first, *transform.transforms])

    @property
    def first(self) -> list[Callable[[Tensor], Tensor]]:
        """What comes before timm's transforms, which take planes as they take images."""
        return [self.normalize] if self.reader else []

    def normalize(self, planes: Tensor) -> Tensor:
        """Normalize planes of any size; a missing number becomes 0, the mean."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((planes - mean) / std).nan_to_num(0.0, 0.0, 0.0)

    def open(self, raw: RawImage, name: str, whole: bool) -> Image.Image | Tensor:
        """Open an image for the transforms, for one crop or `whole`."""
        return load_image(raw, name, self)

    def timms(self) -> dict[str, Any]:
        """Arguments of timm's `create_transform` that training and evaluation share."""
        mean, std = (tuple(values) * (3 // len(values)) for values in (self.mean, self.std))  # gray is still in RGB
        channels = 3
        if self.first:
            channels, mean, std = self.in_chans, (0.0,), (1.0,)
        size = (channels, self.img_size, self.img_size)
        return dict(input_size=size, interpolation=self.interpolation, mean=mean, std=std)


def as_gray(values: Sequence[float]) -> list[float]:
    """The one number that gray images take in place of three, if those are ImageNet's or alike."""
    numbers = GREY.get(tuple(values), [*values])
    return numbers[:1] if len({*numbers}) == 1 else numbers


@dataclass(frozen=True)
class Augmentation(Group):
    """How training images are augmented."""

    scale: Annotated[tuple[float, float], In("(0, 1]")] = (0.08, 1.0)
    """Range of the area of the random crop, as a share of the image."""
    ratio: Annotated[tuple[float, float], In("(0, inf)")] = (3 / 4, 4 / 3)
    """Range of the aspect ratio (width / height) of the random crop, before it is made square as `fit` says."""
    hflip: Annotated[float, In("[0, 1]")] = 0.5
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
        Needs("auto_augment 3a or null", "auto_augment", lambda policy: not policy or policy.startswith("3a")),
    ] = None
    """Strength of brightness, contrast and saturation jitter, or three numbers, one for each, and a fourth of at most
    0.5 for the hue. As in timm it is used only after "3a" or without auto_augment."""
    erase_prob: Annotated[float, In("[0, 1]")] = 0.25
    """Probability of erasing a box of pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "ratio"):
            if [*sorted(getattr(self, name))] != [*getattr(self, name)]:
                raise UserError(f"{name} is a range, the smaller first, got {list(getattr(self, name))}")
        try:
            create_transform(224, is_training=True, **self.timms_augmentation())
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"bad augmentation settings (auto_augment {self.auto_augment!r}): {error}") from error

    def train_transform(self, preprocessing: Preprocessing) -> Compose:
        """timm's training transform, from a PIL image or planes to float32 [C, img_size, img_size], normalized."""
        if preprocessing.first and (self.auto_augment or self.color_jitter):
            raise UserError("auto_augment and color_jitter are for RGB: beside data.reader set both to null")
        stages = create_transform(is_training=True, separate=True, **preprocessing.timms(), **self.timms_augmentation())
        first, policy, final = (stage.transforms for stage in stages)
        if preprocessing.fit != "crop":
            squared = replace(preprocessing, crop_pct=1.0).transform().transforms[-3:-1]
            first[:1] = [ShapedCrop(self.scale, self.ratio), *squared]
        if len(preprocessing.mean) == 1:
            final.insert(2, itemgetter(slice(1)))  # normalized, one of gray's equal three
        return Compose([*preprocessing.first, *first, *policy, *self.own_operations(), *final])

    def own_operations(self) -> list[Callable[[Image.Image], Image.Image]]:
        """What `augment_ops` names. Raises UserError if one of them cannot be imported."""
        return [partial(apply_own, path, locate(path)) for path in self.augment_ops or ()]

    def timms_augmentation(self) -> dict[str, Any]:
        """Arguments of timm's `create_transform` that training alone has."""
        same = ("scale", "ratio", "hflip", "auto_augment", "color_jitter")
        return {name: getattr(self, name) for name in same} | dict(re_prob=self.erase_prob, re_mode="pixel")


def apply_own(path: str, operation: Callable[[Any], Any], image: Any) -> Any:
    """Apply an augmentation of the user's own. Raises UserError if it makes an image of another kind."""
    made = operation(image)
    if (kind := _kind(made)) != _kind(image):
        raise UserError(f"the augmentation {path} must return {_kind(image)}, as it gets, not {kind}")
    return made


def _kind(image: Any) -> str:
    return f"an image in {image.mode} of {image.size}" if isinstance(image, Image.Image) else type(image).__name__


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
        square = torch.empty(side, side, device="meta")
        top, left, rows, columns = RandomResizedCropAndInterpolation.get_params(square, self.scale, self.ratio)
        top, rows = top * height // side, round(rows * height / side)
        left, columns = left * width // side, round(columns * width / side)
        return top, left, max(1, rows), max(1, columns)

    def __call__(self, image: Any) -> Any:
        _, height, width = get_dimensions(image)
        return crop(image, *self.box(width, height))


class NormalizeAndErase:
    """Finish a batch on its device: float32, normalized, boxes filled with noise.

    Mean and standard deviation are for each channel, of pixels in [0, 1]; one number keeps the first of them.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, images: Tensor, erased: Sequence[tuple[int, Erased]] = ()) -> Tensor:
        """uint8 [B, S, S, 3] to float32 [B, C, S, S].

        `erased` are pairs (place in the batch, box); each box has noise of its own seed, whatever the batch.
        """
        device = images.device
        if self.mean.device != device:  # once: the copy waits for the device
            self.mean, self.std = self.mean.to(device), self.std.to(device)
        images = images.permute(0, 3, 1, 2)[:, : len(self.mean)]
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        images = images.div_(255).sub_(self.mean).div_(self.std)
        noise = torch.Generator(device)
        for place, (seed, top, left, height, width) in erased:
            box = images[place, :, top : top + height, left : left + width]
            box.copy_(torch.randn(box.shape, generator=noise.manual_seed(seed), device=device))
        return images


MIXED = Needs("Mixup or CutMix", "mixup cutmix", lambda *alphas: any(alphas))


@dataclass(frozen=True)
class Mixing(Group):
    """Mixup and CutMix of a training batch, as timm does them."""

    mixup: Annotated[float, In("[0, inf)")] = 0.8
    """Alpha of Mixup's beta distribution; 0 turns it off."""
    cutmix: Annotated[float, In("[0, inf)")] = 1.0
    """Alpha of CutMix's beta distribution; 0 turns it off."""
    mix_prob: Annotated[float, In("[0, 1]"), MIXED] = 1.0
    """Probability that a batch (a pair, an image) is mixed at all."""
    mix_switch_prob: Annotated[float, In("[0, 1]"), Needs("both Mixup and CutMix", "mixup cutmix")] = 0.5
    """Probability of CutMix if both are on."""
    mix_mode: Annotated[Literal["batch", "pair", "elem"], MIXED] = "batch"
    """One draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of a batch of B is
    always mixed with image B - 1 - i."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def mix(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mix [B, C, S, S] and labels [B] into images of the same shape and probabilities [B, num_classes].

        Labels [B, num_classes] of several classes per image are mixed in the same shares.
        Label smoothing is left to the loss. It is linear, so smoothing mixed labels gives what timm gets by
        mixing smoothed ones.
        """
        if labels.ndim == 2:  # mix the numbers of the images, and so learn the share of each in each
            images, shares = self.mix(images, torch.arange(len(labels), device=labels.device), len(labels), seed)
            return images, shares @ labels
        np.random.seed(seed)  # timm draws from numpy's global generator
        alphas = dict(mixup_alpha=self.mixup, cutmix_alpha=self.cutmix)
        draws: dict[str, Any] = dict(prob=self.mix_prob, switch_prob=self.mix_switch_prob, mode=self.mix_mode)
        return Mixup(**alphas, **draws, label_smoothing=0.0, num_classes=num_classes)(images, labels)


def is_prepared(data: Any) -> bool:
    """Whether this is a data module whose settings say how it prepares images."""
    return isinstance(getattr(data, "settings", None), Preprocessing)
