"""Pictures as tensors, each a function of (seed, epoch, index, repeat)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cait.data.folder import Samples, load_rgb
from cait.data.sampler import Key


def mix_seeds(*numbers: int) -> int:
    """One 64-bit seed from several numbers; near numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class TrainPictures(Dataset[tuple[Tensor, int]]):
    """Augmented pictures, indexed by (epoch, index, repeat).

    The global generators of `random`, numpy and torch, from which the transforms draw, are seeded
    anew for every picture, so that neither the worker nor its history matters.
    """

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor], seed: int) -> None:
        self.samples, self.transform, self.seed = samples, transform, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        path, label = self.samples[key[1]]
        seed = mix_seeds(self.seed, *key)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed: without CUDA it formats a traceback for every call, a millisecond a picture.
        torch.default_generator.manual_seed(seed)
        return self.transform(load_rgb(path)), label


class EvalPictures(Dataset[tuple[Tensor, int]]):
    """Pictures in their order, under a transform without randomness."""

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor]) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return self.transform(load_rgb(path)), label
