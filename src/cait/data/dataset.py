"""Pictures as tensors, each a function of (seed, epoch, index, repeat)."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from cait import seeds
from cait.data.faults import Faults
from cait.data.folder import Source, load_rgb
from cait.data.sampler import Key
from cait.data.shared import Sent, SharedBatches
from cait.errors import UserError

NO_LABEL = -1
"""Label of a picture that is not to be counted."""


class Samples(Protocol):
    """Pictures by index, from files or out of a data set."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the picture is called in messages, in lists and in a run's digest: its path if it has one."""
        ...

    def source(self, index: int) -> tuple[Source, int]:
        """The picture and the index of its class. Raises UserError where the set cannot give it."""
        ...


def seed_generators(seed: int) -> None:
    """Seed the global generators of `random`, numpy and torch, from which transforms draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: without CUDA it formats a traceback in every call, a millisecond an image.
    torch.default_generator.manual_seed(seed)


class TrainPictures(Dataset[tuple[Any, int]]):
    """Augmented pictures, indexed by (epoch, index, repeat).

    The global generators of `random`, numpy and torch, from which the transforms draw, are seeded
    anew for every picture, so that neither the worker nor its history matters. A picture that cannot
    be read is noted in `faults` and another, drawn from the same key, stands in for it.

    Args:
        open_picture: opens a picture, by its source, its name, and whether several boxes of it are wanted.
        transform: of what `open_picture` returns.
    """

    def __init__(
        self,
        samples: Samples,
        open_picture: Callable[[Source, str, bool], Any],
        transform: Callable[[Any], Any],
        seed: int,
        faults: Faults,
    ) -> None:
        self.samples, self.open_picture, self.transform = samples, open_picture, transform
        self.seed, self.faults = seed, faults

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[Any, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[tuple[Any, int]]:
        """The pictures of a batch; repeats that follow each other are of one that is decoded once."""
        items = []
        for index, repeats in ((index, list(group)) for index, group in groupby(keys, key=lambda key: key[1])):
            opened = None
            if len(repeats) > 1:
                with suppress(UserError):  # which each of them will come upon
                    opened = self._open(index, True)
            items += [self._augmented(key, opened) for key in repeats]
        return items

    def _open(self, index: int, whole: bool = False) -> tuple[Any, int]:
        source, label = self.samples.source(index)
        return self.open_picture(source, self.samples.name(index), whole), label

    def _augmented(self, key: Key, opened: tuple[Any, int] | None) -> tuple[Any, int]:
        index, attempt = key[1], 0
        while True:  # `faults` ends it where there is nothing left to read
            try:
                picture, label = opened or self._open(index)
                seed_generators(seeds.image(self.seed, *key))
                return self.transform(picture), label
            except UserError as error:
                self.faults.note(self.samples.name(index), str(error))
            opened, attempt = None, attempt + 1
            index = seeds.stand_in(self.seed, *key, attempt) % len(self.samples)


def collate(samples: list[tuple[Tensor, int]], batches: SharedBatches | None = None) -> tuple[Tensor | Sent, Tensor]:
    """Images [B, ...] in a place of `batches` if there is one, and labels [B]."""
    images = [image for image, _ in samples]
    labels = torch.tensor([label for _, label in samples])
    return batches.stack(images) if batches else default_collate(images), labels


class EvalPictures(Dataset[tuple[Tensor, int]]):
    """Pictures in their order, under a transform without randomness: uint8 [S, S, 3].

    With `faults`, a picture that cannot be read is noted there and comes black with the label NO_LABEL.
    """

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor], faults: Faults | None = None) -> None:
        self.samples, self.transform, self.faults = samples, transform, faults

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            source, label = self.samples.source(index)
            picture = load_rgb(source, self.samples.name(index))
        except UserError as error:
            if self.faults is None:
                raise
            self.faults.note(self.samples.name(index), str(error))
            picture, label = Image.new("RGB", (8, 8)), NO_LABEL
        return self.transform(picture).permute(1, 2, 0), label
