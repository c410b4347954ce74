"""timm's training transform with less work: decode only the crop, stay in uint8 until the batch is on its device.

Workers hand over their batches in memory that is used again and again.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from mmap import mmap
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from cait.data.loader import READY
from cait.data.reading import RawImage
from cait.data.transforms import Erased, ShapedCrop, size_to_pad
from cait.extras.fast_input.decode import OpenImage, choose, open_image
from cait.extras.fast_input.ops import on_arrays

HOW_READ = {
    "nvimgcodec": "nvImageCodec decodes only the crop of JPEG files",
    "torchvision": "torchvision decodes JPEG files (nvidia-nvimgcodec-cu13 would be faster)",
}
RESIZED_BY_TORCH = ("bilinear", "bicubic")
KEYS = count()
HELD = 3
"""Batches that a training process holds besides those that its workers have ready: one is in use, Lightning has
fetched one ahead, and one is arriving."""
MEMORIES: weakref.WeakValueDictionary[int, SharedBatches] = weakref.WeakValueDictionary()


class Augment:
    """timm's training transform as an `ImageNetDataModule.pipeline`: the same draws, nearly the same pixels.

    It decodes only the crop and resizes it with torch. RandAugment uses the operations of `ops.py`; timm and Pillow do
    the other policies. Normalization and erasing are left to `NormalizeAndErase`. It draws from the global generators
    of `random`, numpy and torch in timm's order.
    """

    name = "cait"  # in checkpoints

    def __init__(self, settings: Any) -> None:
        arguments = settings.timms() | settings.timms_augmentation() | {"hflip": 0.0}
        (self.resized_crop,), policy, final = (
            stage.transforms
            for stage in create_transform(is_training=True, separate=True, **arguments)
        )
        self.decoder = choose()
        self.how_read = HOW_READ[self.decoder]
        self.settings = settings
        self.size = self.resized_crop.size
        self.fill = [round(255 * value) for value in arguments["mean"]]
        self.shaped = ShapedCrop(settings.scale, settings.ratio)
        self.erasing = next((stage for stage in final if isinstance(stage, RandomErasing)), None)
        self.array_ops = [stage for stage in policy if isinstance(stage, RandAugment)]
        self.image_ops = [
            stage for stage in policy if stage not in self.array_ops
        ] + settings.own_operations()
        for stage in self.array_ops:
            for op in stage.ops:
                op.aug_fn = on_arrays(op.aug_fn)
            # numpy, which draws from them, would make it for each image
            stage.ops = np.array(stage.ops)

    def open(self, raw: RawImage, name: str, whole: bool) -> OpenImage:
        """Open an image for `__call__`; see `open_image` in decode.py."""
        return open_image(raw, name, whole, self.decoder, self.settings)

    def __call__(self, image: OpenImage) -> tuple[Tensor, Erased | None]:
        crop = self._cropped(image)
        flipped = self.settings.hflip > 0 and torch.rand(1).item() < self.settings.hflip
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
        return partial(
            collate, memory=SharedBatches(workers, READY + HELD, size) if workers else None
        )

    def _cropped(self, image: OpenImage) -> Tensor:
        """The random crop of the settings as uint8 [S, S, 3]; only the crop is decoded."""
        width, height = image.size
        if self.settings.fit != "crop":
            return self._square(image.crop(self.shaped.box(width, height)))
        timms = self.resized_crop
        box = timms.get_params(torch.empty(height, width, device="meta"), timms.scale, timms.ratio)
        # timm's crop of a tiny image may be empty; Pillow makes that black.
        pixels = image.crop(box) if min(box[2:]) > 0 else np.zeros((1, 1, 3), np.uint8)
        return resize(pixels, self.size, self.settings.interpolation)

    def _square(self, pixels: ndarray) -> Tensor:
        """Squash or pad [height, width, 3] to [S, S, 3]."""
        interpolation = self.settings.interpolation
        if self.settings.fit == "squash":
            return resize(pixels, self.size, interpolation)
        height, width = size_to_pad(torch.empty(pixels.shape[:2], device="meta"), self.size, 1.0)
        top = (self.size[0] - height) // 2
        left = (self.size[1] - width) // 2
        square = torch.tensor(self.fill, dtype=torch.uint8).repeat(*self.size, 1)
        square[top : top + height, left : left + width] = resize(
            pixels, (height, width), interpolation
        )
        return square

    def _erased(self) -> Erased | None:
        """Draw the box as timm's RandomErasing does. timm also draws the noise at once; this draws its seed."""
        if self.erasing is None or random.random() > self.erasing.probability:
            return None
        height, width = self.size
        for _ in range(10):
            area = random.uniform(self.erasing.min_area, self.erasing.max_area) * height * width
            aspect = math.exp(random.uniform(*self.erasing.log_aspect_ratio))
            h = round(math.sqrt(area * aspect))
            w = round(math.sqrt(area / aspect))
            if w < width and h < height:
                top = random.randint(0, height - h)
                left = random.randint(0, width - w)
                return random.getrandbits(63), top, left, h, w
        return None


def resize(pixels: ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize uint8 [height, width, 3] to `size`, antialiased as Pillow does, with torch if it has the filter."""
    if interpolation in RESIZED_BY_TORCH:
        # channels last: torch's fastest path
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
        return F.interpolate(image, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0)
    resample = getattr(Image.Resampling, interpolation.upper())
    return torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))


def collate(samples: list[tuple[Any, int]], memory: SharedBatches | None) -> Any:
    """Images [B, ...] and labels [B], the images in `memory` if it has room.

    If the samples' images are pairs of a tensor and a box to erase, a list of (place in the batch, box) follows.
    """
    images, labels = map(list, zip(*samples, strict=True))
    rest: list[Any] = [np.array(labels)]
    if isinstance(images[0], tuple):
        images, boxes = map(list, zip(*images, strict=True))
        rest.append([(index, box) for index, box in enumerate(boxes) if box])
    where = memory.put(images) if memory is not None else None
    return InMemory(where, rest) if where else (default_collate(images), *_tensors(rest))


def _tensors(rest: list[Any]) -> list[Any]:
    labels, *boxes = rest
    return [torch.from_numpy(labels), *boxes]


class SharedBatches:
    """Places for batches of images, a few for each worker, shared with the workers that are forked.

    PyTorch sends each batch in new memory, which the system must clear and map page by page: a tenth of a worker's
    time. That memory also lies in /dev/shm, which containers keep small.

    A worker takes a place by setting its byte in `taken`. This process clears the byte once nothing refers to
    the batch's tensor any more. If all its places are taken, because somebody keeps batches, a worker sends
    the next one as PyTorch does.
    """

    def __init__(self, workers: int, places: int, size: int) -> None:
        self.places, self.size, self.key = places, size, next(KEYS)
        count = workers * places
        self.memory = mmap(-1, count * (size + 1))  # shared; costs nothing until it is written to
        self.taken = np.frombuffer(self.memory, np.uint8, count, count * size)
        MEMORIES[self.key] = self

    def __reduce__(self) -> Any:
        """A worker that is started anew has none, and sends its batches as PyTorch does."""
        return type(None), ()

    def put(self, images: list[Tensor]) -> tuple[Any, ...] | None:
        """Stack images in a place of this worker and say where; None if it has no room, and outside of workers."""
        worker = get_worker_info()
        shape = (len(images), *images[0].shape)
        dtype = images[0].numpy().dtype
        if worker is None or math.prod(shape) * dtype.itemsize > self.size:
            return None
        first = worker.id * self.places
        for place in range(first, first + self.places):
            if not self.taken[place]:
                self.taken[place] = 1
                torch.stack(images, out=torch.from_numpy(self.array(place, shape, dtype)))
                return self.key, place, shape, dtype
        return None

    def array(self, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ndarray:
        return np.frombuffer(self.memory, dtype, math.prod(shape), place * self.size).reshape(shape)

    def free(self, place: int) -> None:
        self.taken[place] = 0


@dataclass
class InMemory:
    """A batch on its way from a worker. It unpickles as what `collate` returns; the labels travel by value."""

    where: tuple[Any, ...]
    rest: list[Any]

    def __reduce__(self) -> Any:
        return _received, (self.rest, *self.where)


def _received(rest: list[Any], key: int, place: int, shape: Any, dtype: Any) -> tuple[Any, ...]:
    batches = MEMORIES[key]
    array = batches.array(place, shape, dtype)
    weakref.finalize(array, batches.free, place).atexit = False
    # the tensor refers to the array as long as anything uses it
    return torch.from_numpy(array), *_tensors(rest)
