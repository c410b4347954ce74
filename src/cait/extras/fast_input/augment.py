"""timm's training transform with less work: decode only the crop, stay in uint8 until the batch is on its device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from cait.data.loader import READY
from cait.data.reading import RawImage
from cait.data.transforms import Augmentation, Erased, Preprocessing, ShapedCrop, size_to_pad
from cait.extras.fast_input.batches import HELD, SharedBatches, collate
from cait.extras.fast_input.decode import OpenImage, choose, open_image
from cait.extras.fast_input.ops import on_arrays

HOW_READ = {
    "nvimgcodec": "nvImageCodec decodes only the crop of JPEG files",
    "torchvision": "torchvision decodes JPEG files (nvidia-nvimgcodec-cu13 would be faster)",
}
RESIZED_BY_TORCH = ("bilinear", "bicubic")


class Augment:
    """timm's training transform as an `ImageNetDataModule.pipeline`: the same draws, nearly the same pixels.

    It decodes only the crop and resizes it with torch. RandAugment uses the operations of `ops.py`; timm and Pillow do
    the other policies. Normalisation and erasing are left to `NormalizeAndErase`. It draws from the global generators
    of `random`, numpy and torch in timm's order.
    """

    name = "cait"  # in checkpoints: scripts/rename.py leaves it

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        settings = preprocessing.timms() | augmentation.timms() | {"hflip": 0.0}
        stages = create_transform(is_training=True, separate=True, **settings)
        (self.resized_crop,), policy, final = (stage.transforms for stage in stages)
        self.decoder = choose()
        self.how_read = HOW_READ[self.decoder]
        self.reading, self.size = preprocessing.reading, self.resized_crop.size
        self.interpolation, self.hflip = preprocessing.interpolation, augmentation.hflip
        self.fit, self.fill = preprocessing.fit, [round(255 * value) for value in settings["mean"]]
        self.shaped = ShapedCrop(augmentation.scale, augmentation.ratio)
        self.erasing = next((part for part in final if isinstance(part, RandomErasing)), None)
        self.array_ops = [part for part in policy if isinstance(part, RandAugment)]
        self.image_ops = [part for part in policy if part not in self.array_ops] + augmentation.own_operations()
        for part in self.array_ops:
            for op in part.ops:
                op.aug_fn = on_arrays(op.aug_fn)
            part.ops = np.array(part.ops)  # numpy, which draws from them, would make it for each image

    def open(self, raw: RawImage, name: str, whole: bool) -> OpenImage:
        """Open an image for `__call__`; see `open_image` in decode.py."""
        return open_image(raw, name, whole, self.decoder, self.reading)

    def __call__(self, image: OpenImage) -> tuple[Tensor, Erased | None]:
        crop = self._cropped(image)
        flipped = self.hflip > 0 and torch.rand(1).item() < self.hflip
        pixels = (crop.flip(1) if flipped else crop).numpy()
        for op in self.array_ops:
            pixels = op(pixels)
        if self.image_ops:
            augmented = Image.fromarray(pixels)
            for op in self.image_ops:
                augmented = op(augmented)
            pixels = np.array(augmented)
        return torch.from_numpy(pixels), self._erased()

    @staticmethod
    def collate(workers: int, size: int) -> Callable[[list[Any]], Any]:
        """What makes batches of `size` bytes."""
        return partial(collate, memory=SharedBatches(workers, READY + HELD, size) if workers else None)

    def _cropped(self, image: OpenImage) -> Tensor:
        """The random crop of the settings as uint8 [S, S, 3]; only the crop is decoded."""
        width, height = image.size
        if self.fit != "crop":
            return self._square(image.crop(self.shaped.box(width, height)))
        timms = self.resized_crop
        box = timms.get_params(torch.empty(height, width, device="meta"), timms.scale, timms.ratio)
        # timm's crop of a tiny image may be empty; Pillow makes that black.
        pixels = image.crop(box) if min(box[2:]) > 0 else np.zeros((1, 1, 3), np.uint8)
        return resize(pixels, self.size, self.interpolation)

    def _square(self, pixels: np.ndarray) -> Tensor:
        """Squash or pad [height, width, 3] to [S, S, 3]."""
        if self.fit == "squash":
            return resize(pixels, self.size, self.interpolation)
        height, width = size_to_pad(torch.empty(pixels.shape[:2], device="meta"), self.size, 1.0)
        top, left = ((side - part) // 2 for side, part in zip(self.size, (height, width), strict=True))
        square = torch.tensor(self.fill, dtype=torch.uint8).repeat(*self.size, 1)
        square[top : top + height, left : left + width] = resize(pixels, (height, width), self.interpolation)
        return square

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


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [height, width, 3] to `size`, antialiased as Pillow does, with torch if it has the filter."""
    if interpolation in RESIZED_BY_TORCH:
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last: torch's fastest path
        return F.interpolate(image, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)
    resample = getattr(Image.Resampling, interpolation.upper())
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))
