"""timm's training transform with less work: the crop decoded alone, uint8 until the batch is on its device."""

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
from torch import Tensor
from torch.utils.data import default_collate

from cait.data.decode import Picture
from cait.data.ops import on_arrays
from cait.data.shared import Sent, SharedBatches

Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box it fills: top, left, height, width in pixels"""
Augmented = tuple[Tensor, Erased | None]
"""pixels in uint8 [S, S, 3], and what is to be erased of them"""
RESIZED_BY_TORCH = ("bilinear", "bicubic")


class Augment:
    """The transform of timm's `create_transform(is_training=True, **settings)`, in what it draws and, nearly, gives.

    Of a picture it decodes the crop alone, and has torch resize it. The operations of RandAugment and
    AutoAugment are those of `cait.data.ops`, other policies are left to timm and Pillow; normalisation and
    erasing to `Finish`. It draws from the generators of `random`, numpy and torch what timm's would, in
    timm's order.
    """

    def __init__(self, interpolation: str, hflip: float, **settings: Any) -> None:
        stages = create_transform(is_training=True, separate=True, interpolation=interpolation, hflip=0.0, **settings)
        (self.crop,), self.policy, final = (stage.transforms for stage in stages)
        self.hflip = hflip
        self.erasing = next((part for part in final if isinstance(part, RandomErasing)), None)
        self.interpolation = interpolation
        self.by_pillow = not all(isinstance(part, RandAugment | AutoAugment) for part in self.policy)
        if not self.by_pillow:
            for op in chain.from_iterable(map(_operations, self.policy)):
                op.aug_fn = on_arrays(op.aug_fn)

    def __call__(self, picture: Picture) -> Augmented:
        width, height = picture.size
        box = self.crop.get_params(torch.empty(height, width, device="meta"), self.crop.scale, self.crop.ratio)
        # timm's crop of one pixel may hold none, of which Pillow makes black.
        pixels = picture.crop(box) if min(box[2:]) > 0 else np.zeros((1, 1, 3), np.uint8)
        image = resize(pixels, self.crop.size, self.interpolation)
        if self.hflip > 0 and torch.rand(1).item() < self.hflip:
            image = image.flip(1)
        augmented = Image.fromarray(image.numpy()) if self.by_pillow else image.numpy()
        for part in self.policy:
            augmented = part(augmented)
        return torch.from_numpy(np.array(augmented) if self.by_pillow else augmented), self._erased()

    def _erased(self) -> Erased | None:
        """As in timm's RandomErasing, which draws the noise, too, at once."""
        if self.erasing is None or random.random() > self.erasing.probability:
            return None
        height, width = self.crop.size
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


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [height, width, 3] to `size`, antialiased as Pillow does, and by torch where it has the filter."""
    if interpolation in RESIZED_BY_TORCH:
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last, as the quickest of torch's ways
        return F.interpolate(image, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)
    resample = getattr(Image.Resampling, interpolation.upper())
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))


def collate(
    samples: list[tuple[Augmented, int]], batches: SharedBatches | None = None
) -> tuple[Tensor | Sent, Tensor, list[tuple[int, Erased]]]:
    """Images uint8 [B, S, S, 3], labels [B], and what is to be erased of which image."""
    images = [image for (image, _), _ in samples]
    labels = torch.tensor([label for _, label in samples])
    erased = [(place, erased) for place, ((_, erased), _) in enumerate(samples) if erased]
    return batches.stack(images) if batches else default_collate(images), labels, erased


class Finish:
    """What is left to be done with a batch on its device: float32, normalised, boxes filled with noise.

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
