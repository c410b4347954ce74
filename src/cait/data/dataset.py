"""Pictures as tensors, each a function of (seed, epoch, index, repeat)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from cait.data.faults import Faults
from cait.data.sampler import Key
from cait.errors import UserError

NO_LABEL = -1
"""Label of a picture that is not to be counted."""


class Samples(Protocol):
    """Pictures by index, from files or out of a data set."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the picture is called in messages, in lists and in a run's digest: its path if it has one."""
        ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The picture as RGB and the index of its class. Raises UserError where it cannot be read."""
        ...


def mix_seeds(*numbers: int) -> int:
    """One 64-bit seed from several numbers; near numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class TrainPictures(Dataset[tuple[Tensor, int]]):
    """Augmented pictures, indexed by (epoch, index, repeat).

    The global generators of `random`, numpy and torch, from which the transforms draw, are seeded
    anew for every picture, so that neither the worker nor its history matters. A picture that cannot
    be read is noted in `faults` and another, drawn from the same key, stands in for it.
    """

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor], seed: int, faults: Faults) -> None:
        self.samples, self.transform, self.seed, self.faults = samples, transform, seed, faults

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        picture, label = self._read(key)
        seed = mix_seeds(self.seed, *key)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed: without CUDA it formats a traceback for every call, a millisecond a picture.
        torch.default_generator.manual_seed(seed)
        return self.transform(picture), label

    def _read(self, key: Key) -> tuple[Any, int]:
        index, attempt = key[1], 0
        while True:  # `faults` ends it where there is nothing left to read
            try:
                return self.samples.read(index)
            except UserError as error:
                self.faults.note(self.samples.name(index), str(error))
            attempt += 1
            index = mix_seeds(self.seed, *key, attempt) % len(self.samples)


class EvalPictures(Dataset[tuple[Tensor, int]]):
    """Pictures in their order, under a transform without randomness.

    With `faults`, a picture that cannot be read is noted there and comes as zeros with the label NO_LABEL.
    """

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor], faults: Faults | None = None) -> None:
        self.samples, self.transform, self.faults = samples, transform, faults

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            picture, label = self.samples.read(index)
        except UserError as error:
            if self.faults is None:
                raise
            self.faults.note(self.samples.name(index), str(error))
            return torch.zeros_like(self.transform(Image.new("RGB", (8, 8)))), NO_LABEL
        return self.transform(picture), label
