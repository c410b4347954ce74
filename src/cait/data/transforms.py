"""What is done to pixels: the settings, checked, and the transforms that they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation, ResizeKeepRatio
from torch import Tensor
from torchvision.transforms import Compose
from torchvision.transforms.functional import crop, get_dimensions

from cait.data.reading import AS_SEEN, RawImage, Reading, load_image
from cait.errors import UserError, told_as
from cait.references import locate
from cait.settings import check_choice, check_range

Fit = Literal["crop", "pad", "squash"]
CROP_MODES: dict[Fit, str] = {"crop": "center", "pad": "border", "squash": "squash"}  # timm's names
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
GREY = {IMAGENET_DEFAULT_MEAN: [0.458971], IMAGENET_DEFAULT_STD: [0.225609]}
"""ImageNet's mean and deviation as one number: 0.299 of red's, 0.587 of green's and 0.114 of blue's, as in gray."""
Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box that it fills: top, left, height, width in pixels"""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input."""

    img_size: int = 224
    """Side of the square images in pixels."""
    interpolation: str = "bicubic"
    """timm's name of the resampling filter, for training and evaluation."""
    crop_pct: float = 1.0
    """Evaluation resizes the shorter side to img_size / crop_pct, then crops the center."""
    fit: Fit = "crop"
    """How an image that is not square becomes square, in training and evaluation. "pad" resizes the longer side to
    img_size / crop_pct and puts the color `mean` around, "squash" resizes both sides."""
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    """Mean for the normalization, for each channel, of pixels in [0, 1]; for gray images one number, or three alike.
    Planes are as their reader makes them."""
    std: Sequence[float] = IMAGENET_DEFAULT_STD
    """Standard deviation for the normalization, given as `mean` is."""
    reading: Reading = AS_SEEN

    def __post_init__(self) -> None:
        filters = INTERPOLATIONS[:3] if self.reading.reader else INTERPOLATIONS  # torch resizes planes
        check_choice(self, {"interpolation": filters, "fit": get_args(Fit)})
        check_range(self, "[1, inf)", "img_size")
        check_range(self, "(0, 1]", "crop_pct")
        check_range(self, "(-inf, inf)", "mean")
        check_range(self, "(0, inf)", "std")
        mean, std, gray = [*self.mean], [*self.std], self.reading.in_chans == 1
        if gray:  # one number, for three that are ImageNet's or alike
            mean, std = GREY.get(tuple(mean), mean), GREY.get(tuple(std), std)
            mean, std = (each[:1] if len({*each}) == 1 else each for each in (mean, std))
        channels = self.reading.in_chans if self.reading.reader or gray else 3
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
        return [self.normalize] if self.reading.reader else []

    def normalize(self, planes: Tensor) -> Tensor:
        """Normalize planes of any size; a missing number becomes 0, the mean."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((planes - mean) / std).nan_to_num(0.0, 0.0, 0.0)

    def open(self, raw: RawImage, name: str, whole: bool) -> Image.Image | Tensor:
        """Open an image for the transforms, for one crop or `whole`."""
        return load_image(raw, name, self.reading)

    def timms(self) -> dict[str, Any]:
        """Arguments of timm's `create_transform` that training and evaluation share."""
        mean, std = (tuple(values) * (3 // len(values)) for values in (self.mean, self.std))  # gray is still in RGB
        channels = 3
        if self.first:
            channels, mean, std = self.reading.in_chans, (0.0,), (1.0,)
        size = (channels, self.img_size, self.img_size)
        return dict(input_size=size, interpolation=self.interpolation, mean=mean, std=std)


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the area of the random crop, as a share of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the aspect ratio (width / height) of the random crop, before it is made square as `fit` says."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's policy string, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "3a" (DeiT III's ThreeAugment: gray,
    solarized or blurred; there with color_jitter 0.3). None turns it off."""
    augment_ops: list[str] | None = None
    """Augmentation operations of your own, as "package.module:function". Each takes and returns a PIL image in RGB of
    the crop's size, of planes a normalized tensor, after auto_augment. A run stays exact if they draw only from the
    global generators of `random`, numpy and torch, which are seeded for each image."""
    color_jitter: float | Sequence[float] | None = None
    """Strength of brightness, contrast and saturation jitter, or three numbers, one for each, and a fourth of at most
    0.5 for the hue. As in timm it is used only after "3a" or without auto_augment."""
    erase_prob: float = 0.25
    """Probability of erasing a box of pixels."""

    def __post_init__(self) -> None:
        check_range(self, "[0, 1]", "hflip", "erase_prob")
        check_range(self, "(0, 1]", "scale")
        check_range(self, "(0, inf)", "ratio")
        check_range(self, "[0, inf)", "color_jitter")
        for name in ("scale", "ratio"):
            if [*sorted(getattr(self, name))] != [*getattr(self, name)]:
                raise UserError(f"{name} is a range, the smaller first, got {list(getattr(self, name))}")
        try:
            create_transform(224, is_training=True, **self.timms())
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(f"bad augmentation settings (auto_augment {self.auto_augment!r}): {error}") from error

    def transform(self, preprocessing: Preprocessing) -> Compose:
        """timm's training transform, from a PIL image or planes to float32 [C, img_size, img_size], normalized."""
        if preprocessing.first and (self.auto_augment or self.color_jitter):
            raise UserError("auto_augment and color_jitter are for RGB: beside data.reader set both to null")
        stages = create_transform(is_training=True, separate=True, **preprocessing.timms(), **self.timms())
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

    def timms(self) -> dict[str, Any]:
        """Arguments of timm's `create_transform` that training alone has."""
        same = ("scale", "ratio", "hflip", "auto_augment", "color_jitter")
        return {name: getattr(self, name) for name in same} | dict(re_prob=self.erase_prob, re_mode="pixel")


def apply_own(path: str, operation: Callable[[Any], Any], image: Any) -> Any:
    """Apply an augmentation of the user's own. Raises UserError if it fails, or makes an image of another kind."""
    with told_as(f"the augmentation {path} fails"):
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


@dataclass(frozen=True)
class Mixing:
    """Mixup and CutMix of a training batch, as timm does them."""

    mixup: float = 0.8
    """Alpha of Mixup's beta distribution; 0 turns it off."""
    cutmix: float = 1.0
    """Alpha of CutMix's beta distribution; 0 turns it off."""
    mix_prob: float = 1.0
    """Probability that a batch (a pair, an image) is mixed at all."""
    mix_switch_prob: float = 0.5
    """Probability of CutMix if both are on."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """One draw for the whole "batch", for each "pair" of images, or for each image ("elem"). Image i of a batch of B is
    always mixed with image B - 1 - i."""

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "mixup", "cutmix")
        check_choice(self, {"mix_mode": ("batch", "pair", "elem")})
        check_range(self, "[0, 1]", "mix_prob", "mix_switch_prob")

    @property
    def is_on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mix [B, C, S, S] and labels [B] into images of the same shape and probabilities [B, num_classes].

        Labels [B, num_classes] of several classes per image are mixed in the same shares.
        Label smoothing is left to the loss. It is linear, so smoothing mixed labels gives what timm gets by
        mixing smoothed ones.
        """
        if labels.ndim == 2:  # mix the numbers of the images, and so learn the share of each in each
            images, shares = self(images, torch.arange(len(labels), device=labels.device), len(labels), seed)
            return images, shares @ labels
        np.random.seed(seed)  # timm draws from numpy's global generator
        alphas = dict(mixup_alpha=self.mixup, cutmix_alpha=self.cutmix)
        draws: dict[str, Any] = dict(prob=self.mix_prob, switch_prob=self.mix_switch_prob, mode=self.mix_mode)
        return Mixup(**alphas, **draws, label_smoothing=0.0, num_classes=num_classes)(images, labels)
