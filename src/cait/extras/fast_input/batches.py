"""Memory in which workers hand over their batches, used again and again.

PyTorch sends each batch in new memory, which the system must clear and map page by page: a tenth of a worker's time.
That memory also lies in /dev/shm, which containers keep small.
"""

from __future__ import annotations

import math
import weakref
from itertools import count
from mmap import mmap
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


def collate(samples: list[tuple[Any, int]], memory: SharedBatches | None) -> Any:
    """Images [B, ...] and labels [B], the images in `memory` if it has room; and what to erase.

    Args:
        samples: pairs of an image and its class. An image is a tensor, or a tensor and the box to erase.

    Returns:
        images and labels; and if the images came with boxes, a list of (place in the batch, box).
    """
    images, labels = map(list, zip(*samples, strict=True))
    rest: list[Any] = [np.array(labels)]
    if isinstance(images[0], tuple):
        images, boxes = map(list, zip(*images, strict=True))
        rest.append([(place, box) for place, box in enumerate(boxes) if box])
    where = memory.put(images) if memory is not None else None
    return InMemory(where, rest) if where else (default_collate(images), *_tensors(rest))


def _tensors(rest: list[Any]) -> list[Any]:
    labels, *boxes = rest
    return [torch.from_numpy(labels), *boxes]


class SharedBatches:
    """Places for batches of images, a few for each worker, shared with the workers that are forked.

    A worker takes a place by setting its byte in `taken`. This process clears the byte once nothing refers to
    the batch's tensor any more. If all its places are taken, because somebody keeps batches, a worker sends
    the next one as PyTorch does.

    Args:
        places: number for each worker: the batches that it has ready, and HELD more.
        size: bytes of a batch.
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
        shape, dtype = (len(images), *images[0].shape), images[0].numpy().dtype
        if worker is not None and math.prod(shape) * dtype.itemsize <= self.size:
            first = worker.id * self.places
            for place in range(first, first + self.places):
                if not self.taken[place]:
                    self.taken[place] = 1
                    torch.stack(images, out=torch.from_numpy(self.array(place, shape, dtype)))
                    return self.key, place, shape, dtype
        return None

    def array(self, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, math.prod(shape), place * self.size).reshape(shape)

    def free(self, place: int) -> None:
        self.taken[place] = 0


class InMemory:
    """A batch on its way from a worker. It unpickles as what `collate` returns; the labels travel by value."""

    def __init__(self, where: tuple[Any, ...], rest: list[Any]) -> None:
        self.where, self.rest = where, rest

    def __reduce__(self) -> Any:
        return _received, (self.rest, *self.where)


def _received(rest: list[Any], key: int, place: int, *kind: Any) -> tuple[Any, ...]:
    batches = MEMORIES[key]
    array = batches.array(place, *kind)
    weakref.finalize(array, batches.free, place).atexit = False
    return torch.from_numpy(array), *_tensors(rest)  # the tensor refers to the array as long as anything uses it
