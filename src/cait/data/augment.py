"""timm's training transform with less work: the crop decoded alone, uint8 until the batch is on its device."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import default_collate

from cait.data.decode import Picture

Erased = tuple[int, int, int, int, int]
"""seed of the noise, and the box it fills: top, left, height, width in pixels"""
Augmented = tuple[Tensor, Erased | None]
"""pixels in uint8 [S, S, 3], and what is to be erased of them"""
RESIZED_BY_TORCH = ("bilinear", "bicubic")


class Augment:
    """The transform of timm's `create_transform(is_training=True, **settings)`, in what it draws and, nearly, gives.

    Of a picture it decodes the crop alone, and has torch resize it; Pillow and timm do the rest but for
    the shears and translations, which are `Shift` here. Left to `Finish` are normalisation and erasing.
    It draws from the generators of `random`, numpy and torch what timm's would, in timm's order.
    """

    def __init__(self, interpolation: str, hflip: float, **settings: Any) -> None:
        stages = create_transform(is_training=True, separate=True, interpolation=interpolation, hflip=0.0, **settings)
        (self.crop,), self.policy, final = (stage.transforms for stage in stages)
        self.hflip = hflip
        self.erasing = next((part for part in final if isinstance(part, RandomErasing)), None)
        self.interpolation = interpolation
        for part in self.policy:
            for op in _operations(part):
                if op.aug_fn in SHIFTS:
                    op.aug_fn = Shift(op.aug_fn)

    def __call__(self, picture: Picture) -> Augmented:
        width, height = picture.size
        box = self.crop.get_params(torch.empty(height, width, device="meta"), self.crop.scale, self.crop.ratio)
        image = resize(picture.crop(box), self.crop.size, self.interpolation)
        if self.hflip > 0 and torch.rand(1).item() < self.hflip:
            image = image.flip(1)
        if self.policy:
            given = augmented = Image.fromarray(image.numpy())
            for part in self.policy:
                augmented = part(augmented)
            if augmented is not given:
                image = torch.from_numpy(np.array(augmented))
        return image, self._erased()

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


def _operations(part: Any) -> Iterator[Any]:
    """timm's AugmentOps in one of its policies; none in a transform of another kind."""
    stack = [getattr(part, "ops", getattr(part, "policy", []))]
    while stack:
        entry = stack.pop()
        if isinstance(entry, list):
            stack.extend(entry)
        else:
            yield entry


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [height, width, 3] to `size`, antialiased as Pillow does, and by torch where it has the filter."""
    if interpolation in RESIZED_BY_TORCH:
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last, as the quickest of torch's ways
        return F.interpolate(image, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)
    resample = getattr(Image.Resampling, interpolation.upper())
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))


class Shift:
    """A shear or translation of timm's under Pillow's bicubic filter, four times as fast.

    Each row (or column) is moved by a number of pixels of its own, so Pillow's 4 × 4 taps come to 4.

    Args:
        timms: one of timm's functions, of which it takes the place.
    """

    def __init__(self, timms: Any) -> None:
        self.timms = timms

    def __call__(self, image: Image.Image, amount: float, **settings: Any) -> Image.Image:
        if settings["resample"] != Image.Resampling.BICUBIC:
            return self.timms(image, amount, **settings)
        along_x, is_shear, is_share = SHIFTS[self.timms]
        if not along_x:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        width, height = image.size
        shifts = (
            (np.arange(height) + 0.5) * amount if is_shear else np.full(height, amount * (width if is_share else 1))
        )
        moved = _shift_rows(image, shifts, settings["fillcolor"])
        return moved if along_x else moved.transpose(Image.Transpose.TRANSPOSE)


SHIFTS = {
    auto_augment.shear_x: (True, True, False),
    auto_augment.shear_y: (False, True, False),
    auto_augment.translate_x_rel: (True, False, True),
    auto_augment.translate_y_rel: (False, False, True),
    auto_augment.translate_x_abs: (True, False, False),
    auto_augment.translate_y_abs: (False, False, False),
}
"""timm's function: is it along x; is it a shear; is its amount a share of the side"""


def _shift_rows(image: Image.Image, shifts: np.ndarray, fill: tuple[int, ...]) -> Image.Image:
    """Pixel x of row y from place x + shifts[y], which lies between four pixels; `fill` where it is outside."""
    width, height = image.size
    grid, places, taps, values, terms = _scratch(height, width)
    whole = np.floor(shifts)
    d = torch.from_numpy((shifts - whole).astype(np.float32))[:, None]
    # A row's taps are gathered by place in the picture, those beyond its ends from the ends.
    np.add(grid, whole.astype(np.intp)[:, None], out=places)
    np.maximum(places, grid[:, 1:2], out=places)
    np.minimum(places, grid[:, width : width + 1], out=places)
    packed = np.frombuffer(image.tobytes("raw", "RGBX"), np.int32)  # a pixel a number
    taps.copy_(torch.from_numpy(packed.take(places).view(np.uint8)))
    v1, v2, v3, v4 = (taps[:, 4 * i : 4 * (i + width)] for i in range(4))
    # Pillow's bicubic filter, a = -1: v2 + d (v3 - v1 + d (2 (v1 - v2) + v3 - v4 + d (v2 - v1 + v4 - v3)))
    torch.sub(v1, v2, out=values)
    torch.sub(v4, v3, out=terms).sub_(values)
    values.sub_(terms).addcmul_(terms, d)
    torch.sub(v3, v1, out=terms).addcmul_(values, d)
    torch.addcmul(v2, terms, d, out=values).clamp_(0, 255)
    moved = values.numpy().astype(np.uint8).view(np.int32)
    begin = np.ceil(-shifts - 0.5)[:, None]  # of the pixels whose centres lie inside
    x = np.arange(width)
    np.copyto(moved, np.array([*fill, 0], np.uint8).view(np.int32), where=(x < begin) | (x >= begin + width))
    return Image.frombytes("RGB", image.size, moved, "raw", "RGBX")


@cache
def _scratch(height: int, width: int) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor, Tensor]:
    """Places of the taps of an unmoved picture, and memory to work in.

    It is kept, for freed it would go back to the system, and to be given it anew takes longer than the work.
    """
    grid = np.arange(height)[:, None] * width + np.arange(-1, width + 2)
    memory = (torch.empty(height, 4 * (width + 3)), torch.empty(height, 4 * width), torch.empty(height, 4 * width))
    return grid, np.empty_like(grid), *memory


def collate(samples: list[tuple[Augmented, int]]) -> tuple[Tensor, Tensor, list[tuple[int, Erased]]]:
    """Images uint8 [B, S, S, 3], labels [B], and what is to be erased of which image."""
    images, labels = default_collate([(image, label) for (image, _), label in samples])
    return images, labels, [(place, erased) for place, ((_, erased), _) in enumerate(samples) if erased]


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
