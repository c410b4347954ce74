"""timm's training transform with less work: decode only the crop, stay in uint8 until the batch is on its device."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, AutoAugment, RandAugment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode
from torch import Tensor
from torchvision.transforms import RandomCrop, Resize

from cait.data.decode import Decoder, OpenImage, open_image
from cait.data.loader import BatchMemory, batch
from cait.data.ops import on_arrays
from cait.data.reading import RawImage, Reading
from cait.errors import UserError, kind_and_place
from cait.references import is_path, locate

Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box that it fills: top, left, height, width in pixels"""
Augmented = tuple[Tensor, Erased | None]
"""pixels in uint8 [S, S, 3], and what to erase"""
RESIZED_BY_TORCH = ("bilinear", "bicubic")
PADDING = 4
"""Pixels that DeiT III adds around an image before it crops."""


class Augment:
    """The transform of timm's `create_transform(is_training=True, **settings)`: the same draws, nearly the same pixels.

    It decodes only the crop and resizes it with torch. RandAugment and AutoAugment use the operations of
    `cait.data.ops`; timm and Pillow do the other policies. Normalisation and erasing are left to
    `NormalizeAndErase`. It draws from the global generators of `random`, numpy and torch in timm's order.

    Args:
        simple_crop: crop as `SimpleCrop` does instead.
        own_ops: operations on PIL images that follow the policy.
    """

    def __init__(
        self,
        decoder: Decoder,
        reading: Reading,
        simple_crop: bool,
        own_ops: Sequence[OwnOperation],
        interpolation: str,
        hflip: float,
        **settings: Any,
    ) -> None:
        stages = create_transform(is_training=True, separate=True, interpolation=interpolation, hflip=0.0, **settings)
        (resized_crop,), policy, final = (stage.transforms for stage in stages)
        self.decoder, self.reading, self.hflip, self.size = decoder, reading, hflip, resized_crop.size
        self.crop = SimpleCrop(self.size, interpolation) if simple_crop else ResizedCrop(resized_crop, interpolation)
        self.erasing = next((part for part in final if isinstance(part, RandomErasing)), None)
        fast = all(isinstance(part, RandAugment | AutoAugment) for part in policy)
        self.array_ops: list[Any] = policy if fast else []
        self.image_ops: list[Any] = [*([] if fast else policy), *own_ops]
        for op in chain.from_iterable(map(_operations, self.array_ops)):
            op.aug_fn = on_arrays(op.aug_fn)

    def open(self, raw: RawImage, name: str, whole: bool) -> OpenImage:
        """Open an image for `__call__`; see `cait.data.decode.open_image`."""
        return open_image(raw, name, whole, self.decoder, self.reading)

    def __call__(self, image: OpenImage) -> Augmented:
        crop = self.crop(image)
        if self.hflip > 0 and torch.rand(1).item() < self.hflip:
            crop = crop.flip(1)
        pixels = crop.numpy()
        for op in self.array_ops:
            pixels = op(pixels)
        if self.image_ops:
            augmented = Image.fromarray(pixels)
            for op in self.image_ops:
                augmented = op(augmented)
            pixels = np.array(augmented)
        return torch.from_numpy(pixels), self._erased()

    def _erased(self) -> Erased | None:
        """Draw the box as timm's RandomErasing does. timm also draws the noise at once; this draws its seed."""
        if self.erasing is None or random.random() > self.erasing.probability:
            return None
        height, width = self.size
        for _ in range(10):
            area = random.uniform(self.erasing.min_area, self.erasing.max_area) * height * width
            aspect = math.exp(random.uniform(*self.erasing.log_aspect_ratio))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if w < width and h < height:
                top, left = random.randint(0, height - h), random.randint(0, width - w)
                return random.getrandbits(63), top, left, h, w
        return None


def _operations(part: RandAugment | AutoAugment) -> Iterator[AugmentOp]:
    yield from part.ops if isinstance(part, RandAugment) else chain.from_iterable(part.policy)


class ResizedCrop:
    """timm's random crop, resized to uint8 [S, S, 3]; only the crop is decoded."""

    def __init__(self, timms: RandomResizedCropAndInterpolation, interpolation: str) -> None:
        self.timms, self.interpolation = timms, interpolation

    def __call__(self, image: OpenImage) -> Tensor:
        width, height = image.size
        box = self.timms.get_params(torch.empty(height, width, device="meta"), self.timms.scale, self.timms.ratio)
        # timm's crop of a tiny image may be empty; Pillow makes that black.
        pixels = image.crop(box) if min(box[2:]) > 0 else np.zeros((1, 1, 3), np.uint8)
        return resize(pixels, self.timms.size, self.interpolation)


class SimpleCrop:
    """DeiT III's simple random crop, uint8 [S, S, 3]: torchvision's Resize(S), then RandomCrop of S.

    The shorter side is resized to S, PADDING pixels of reflection are added around, and a square is cut out.
    """

    def __init__(self, size: tuple[int, int], interpolation: str) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: OpenImage) -> Tensor:
        width, height = image.size
        side, short = self.size[0], min(width, height)
        resized = (int(side * height / short), int(side * width / short))
        pixels = resize(image.crop((0, 0, height, width)), resized, self.interpolation).numpy()
        padded = np.pad(pixels, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)), mode="reflect")
        top, left, _, _ = RandomCrop.get_params(torch.empty(padded.shape[:2], device="meta"), self.size)
        return torch.from_numpy(padded[top : top + side, left : left + side].copy())


def simple_crop(size: int, interpolation: str) -> list[Any]:
    """`SimpleCrop` on PIL images, by torchvision."""
    resample = str_to_interp_mode(interpolation)
    return [Resize(size, resample), RandomCrop(size, padding=PADDING, padding_mode="reflect")]


class OwnOperation:
    """An augmentation operation of the user's, a function from PIL image to PIL image.

    Args:
        path: where it is, as "package.module:function".

    Raises:
        UserError: there is no such function.
    """

    def __init__(self, path: str) -> None:
        if not is_path(path):
            raise UserError(f"augment_ops takes names such as package.module:function, got {path!r}")
        self.path, self.function = path, locate(path)
        if not callable(self.function):
            raise UserError(f"augment_ops: {path} is not a function")

    def __call__(self, image: Image.Image) -> Image.Image:
        """Apply it to an RGB image. Raises UserError if it returns anything but an image of the same size."""
        try:
            changed = self.function(image)
        except Exception as error:
            raise UserError(f"augment_ops: {self.path} failed: {kind_and_place(error)}") from error
        if not isinstance(changed, Image.Image) or changed.size != image.size:
            size = f" of {changed.size}" if isinstance(changed, Image.Image) else ""
            raise UserError(
                f"augment_ops: {self.path} must return a PIL image of {image.size}, "
                f"it returned {type(changed).__name__}{size}"
            )
        return changed if changed.mode == "RGB" else changed.convert("RGB")


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [height, width, 3] to `size`, antialiased as Pillow does, with torch if it has the filter."""
    if interpolation in RESIZED_BY_TORCH:
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last: torch's fastest path
        return F.interpolate(image, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)
    resample = getattr(Image.Resampling, interpolation.upper())
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))


def collate(
    samples: list[tuple[Augmented, int]], memory: BatchMemory | None = None
) -> tuple[Any, Any, list[tuple[int, Erased]]]:
    """Images uint8 [B, S, S, 3], labels [B], and (place in the batch, what to erase) of the images concerned."""
    augmented, labels = zip(*samples, strict=True)
    erased = [(place, erased) for place, (_, erased) in enumerate(augmented) if erased]
    return *batch([pixels for pixels, _ in augmented], [*labels], memory), erased


class NormalizeAndErase:
    """Finish a batch on its device: float32, normalised, boxes filled with noise.

    Args:
        mean: for each channel, of pixels in [0, 1].
        std: the same.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, images: Tensor, erased: Sequence[tuple[int, Erased]] = ()) -> Tensor:
        """uint8 [B, S, S, 3] to float32 [B, 3, S, S]; each box has noise of its own seed, whatever the batch."""
        device = images.device
        if self.mean.device != device:  # once: the copy waits for the device
            self.mean, self.std = self.mean.to(device), self.std.to(device)
        images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        images = images.div_(255).sub_(self.mean).div_(self.std)
        noise = torch.Generator(device)
        for place, (seed, top, left, height, width) in erased:
            box = images[place, :, top : top + height, left : left + width]
            box.copy_(torch.randn(box.shape, generator=noise.manual_seed(seed), device=device))
        return images
