"""Memory in which workers hand over their batches, used again and again.

PyTorch sends each batch in new memory, which the system must clear and map page by page: a tenth of a worker's time.
That memory also lies in /dev/shm, which containers keep small.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable
from itertools import count
from mmap import mmap
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

KEYS = count()
HELD = 3
"""Batches that a training process holds besides those that its workers have ready: one is in use, Lightning has
fetched one ahead, and one is arriving."""
MEMORIES: weakref.WeakValueDictionary[int, SharedBatches] = weakref.WeakValueDictionary()


def collate(samples: list[tuple[Any, int]], memory: SharedBatches | None) -> tuple[Any, ...]:
    """Images [B, ...] and labels [B], in `memory` if there is any; and what to erase.

    Args:
        samples: pairs of an image and its class. An image is a tensor, or a tensor and the box to erase.

    Returns:
        images and labels; and if the images came with boxes, a list of (place in the batch, box).
    """
    images, labels = map(list, zip(*samples, strict=True))
    small = torch.from_numpy if memory is None else memory.small
    rest: list[Any] = []
    if isinstance(images[0], tuple):
        images, boxes = map(list, zip(*images, strict=True))
        rest = [[(place, box) for place, box in enumerate(boxes) if box]]
    pixels = default_collate(images) if memory is None else memory.stack(images)
    return pixels, small(np.array(labels)), *rest


class SharedBatches:
    """Places for batches of images, a few for each worker, shared with the workers, however they start.

    A worker takes a place by setting its byte in `taken`. This process clears the byte once nothing refers to
    the batch's tensor any more. If all its places are taken, because somebody keeps batches, a worker sends
    the next one as PyTorch does.

    Args:
        places: number for each worker: the batches that it has ready, and HELD more.
        size: bytes of a batch.
    """

    def __init__(self, workers: int, places: int, size: int) -> None:
        self.places, self.size = places, size
        self.key, self.file = next(KEYS), os.memfd_create("batches")
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, workers * places * (size + 1))  # costs nothing until it is written to
        self._map(workers * places)
        MEMORIES[self.key] = self

    def _map(self, places: int) -> None:
        self.memory = mmap(self.file, places * (self.size + 1))
        self.taken = np.frombuffer(self.memory, np.uint8, places, places * self.size)

    def __reduce__(self) -> Any:
        """On the way to a worker that is not forked from this process."""
        return _attached, (DupFd(self.file), self.key, self.places, self.size, len(self.taken))

    @staticmethod
    def possible() -> bool:
        """Whether there is memory without a file that other processes can map."""
        return sys.platform == "linux"

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

    @staticmethod
    def small(values: np.ndarray) -> Tensor | ByValue:
        """What is small in a batch; from a worker it travels in its message."""
        return torch.from_numpy(values) if get_worker_info() is None else ByValue(values)

    def array(self, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, math.prod(shape), place * self.size).reshape(shape)

    def free(self, place: int) -> None:
        self.taken[place] = 0


def _attached(file: Any, key: int, places: int, size: int, count: int) -> SharedBatches:
    batches = SharedBatches.__new__(SharedBatches)
    batches.key, batches.file, batches.places, batches.size = key, file.detach(), places, size
    batches._map(count)
    return batches


class ByValue:
    """A few numbers on their way from a worker; they unpickle as a tensor. PyTorch would open a file for them."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[np.ndarray]]:
        return torch.from_numpy, (self.values,)


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
