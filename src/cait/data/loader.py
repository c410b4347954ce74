"""The loader: its settings, when it starts, and the memory in which its workers hand over batches."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from mmap import mmap
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info

from cait.data.sampler import TrainBatchSampler
from cait.errors import UserError
from cait.settings import check_at_least, check_choice

Backend = Literal["auto", "nvimgcodec", "torchvision", "pillow", "timm"]
KEYS = count()
HELD = 3
"""Batches that a training process holds besides those that its workers have ready: one is in use, Lightning has
fetched one ahead, and one is arriving."""
MEMORIES: weakref.WeakValueDictionary[int, SharedBatches] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Loading:
    """How images are read and put into batches.

    Raises:
        UserError: a setting is out of range.
    """

    batch_size: int = 128
    """Images in a batch of one process; even with Mixup or CutMix."""
    global_batch: bool | int = False
    """Make `batch_size` the images of one optimizer step, over all processes and accumulated batches, so that a run
    does not depend on the number of processes. A number is the images of one optimizer step instead: `batch_size` stays
    the batch of one process, and the Trainer accumulates as many batches as it takes. An epoch then has only whole
    steps."""
    eval_batch_size: int | None = None
    """The batch of one process in validation, test and prediction; None means `batch_size`."""
    backend: Backend = "auto"
    """What reads the training images. "nvimgcodec" decodes only the crop of JPEG files, "torchvision" and "pillow"
    decode all of it. These three give the same pixels, and "auto" takes the first that is installed. They make timm's
    random draws and nearly its pixels: see `cait.data.augment.Augment`. "timm" is timm's own transform, to the last
    bit. Evaluation always uses timm's pixels."""
    repeats: int = 3
    """Repeated augmentation: how often each sampled image occurs in an epoch, each time augmented anew. The epoch stays
    as long as without it."""
    decode_once: bool = False
    """Keep the repeats of an image in one process, which decodes it once. Not as published: see
    `cait.data.sampler.TrainBatchSampler`. It changes nothing with one process."""
    num_workers: int | None = None
    """Loader processes for each training process, each on one core. None means its share of the cores, at most 16, see
    `cait.data.cores.share`."""
    prefetch: int = 2
    """Batches that each worker has ready."""
    max_bad_share: float = 0.01
    """Share of the images that may be unreadable. In training others stand in for them, validation leaves them out, and
    unreadable_images.csv in the run's folder lists them. If there are more, the run fails."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "eval_batch_size", "repeats", "prefetch")
        check_at_least(self, 0, "num_workers")
        check_choice(self, {"backend": get_args(Backend)})
        if not isinstance(self.global_batch, bool) and self.global_batch < 1:
            raise UserError(f"global_batch must be true, false or at least 1, got {self.global_batch}")
        if not 0 <= self.max_bad_share < 1:
            raise UserError(f"max_bad_share must be in [0, 1), got {self.max_bad_share}")


class Loader(DataLoader[Any]):
    """A DataLoader that measures how long its user waits.

    Args:
        finish: applied to each batch in this process, where Lightning's hook does not run.
    """

    def __init__(self, *args: Any, finish: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finish = finish
        self.waited = 0.0
        """Seconds that its user has waited for batches so far."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = time.perf_counter()
        batches = super().__iter__()
        while (batch := next(batches, None)) is not None:
            self.waited += time.perf_counter() - start
            yield self.finish(batch) if self.finish else batch
            start = time.perf_counter()


class TrainLoader(Loader):
    """A loader that asks where to start only when its first batch is fetched.

    Lightning calls `iter()` before it has restored the epoch and the batch of a checkpoint. A loader
    that started its workers then would replay the wrong epoch.

    Args:
        position: returns (epoch, first batch) of the pass that is about to begin.
    """

    def __init__(self, *args: Any, position: Callable[[], tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.batch_sampler
        assert isinstance(sampler, TrainBatchSampler)
        sampler.epoch, sampler.first_batch = self.position()
        yield from super().__iter__()


class SharedBatches:
    """Places for batches of images, a few for each worker, shared with the processes forked after it is made.

    PyTorch sends each batch in new memory, which the system must clear and map page by page: a tenth of a worker's
    time. That memory also lies in /dev/shm, which containers keep small.

    A worker takes a place by setting its byte in `taken`. This process clears the byte once nothing refers to
    the batch's tensor any more. If all its places are taken, because somebody keeps batches, a worker sends
    the next one as PyTorch does.

    Args:
        places: number for each worker: the batches that it has ready, and HELD more.
        size: bytes of a batch.
    """

    def __init__(self, workers: int, places: int, size: int) -> None:
        self.places, self.size = places, size
        self.memory = mmap(-1, workers * places * size)  # costs nothing until it is written to
        self.taken = np.frombuffer(mmap(-1, workers * places), np.uint8)
        self.key = next(KEYS)
        MEMORIES[self.key] = self

    @staticmethod
    def possible() -> bool:
        """Whether workers can be forked; others would not share the memory."""
        return sys.platform == "linux"  # elsewhere a fork is not safe

    def stack(self, images: list[Tensor]) -> Tensor | Handle:
        """Stack a batch; a worker stacks it into one of its places if one is free."""
        worker = get_worker_info()
        shape, dtype = (len(images), *images[0].shape), images[0].numpy().dtype
        if worker is not None and math.prod(shape) * dtype.itemsize <= self.size:
            first = worker.id * self.places
            for place in range(first, first + self.places):
                if not self.taken[place]:
                    self.taken[place] = 1
                    torch.stack(images, out=torch.from_numpy(self.array(place, shape, dtype)))
                    return Handle(self.key, place, shape, dtype)
        return default_collate(images)

    def array(self, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, math.prod(shape), place * self.size).reshape(shape)

    def free(self, place: int) -> None:
        self.taken[place] = 0


def labels_of(values: list[int]) -> Tensor | ByValue:
    """Labels [B] of a batch; from a worker they travel in its message."""
    return torch.tensor(values) if get_worker_info() is None else ByValue(values)


class ByValue:
    """A few numbers on their way from a worker; they unpickle as a tensor. PyTorch would open a file for them."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[list[int]]]:
        return torch.tensor, (self.values,)


class Handle:
    """A batch on its way from a worker; it unpickles as the tensor."""

    def __init__(self, *where: Any) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return _received, self.where


def _received(key: int, place: int, *kind: Any) -> Tensor:
    batches = MEMORIES[key]
    array = batches.array(place, *kind)
    weakref.finalize(array, batches.free, place).atexit = False
    return torch.from_numpy(array)  # the tensor's memory refers to the array as long as any tensor uses it
