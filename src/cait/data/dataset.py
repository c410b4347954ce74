"""Images as tensors, each a function of (seed, epoch, index, repeat)."""

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cait import seeds
from cait.data.loader import NO_IMAGE, Key
from cait.data.reading import (
    RawImage,
    Reading,
    UnreadableImageError,
    UnreadableImages,
    check_raw,
    load_image,
)
from cait.errors import UserError

NO_LABEL = -1
"""Label of an image that is not counted."""


class Samples(Protocol):
    """Images by index, from files or from a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[RawImage, int]:
        """The image, not decoded yet, and the index of its class. Raises UnreadableImageError."""

    def name(self, index: int) -> str:
        """The image's name in messages, in lists and in a run's digest: its path if it has one."""


class MapSamples:
    """One split of the map-style data set called `root`, as `Samples`.

    It has pairs of an image and the index of its class; NO_LABEL is for an image without a class.
    """

    def __init__(
        self, root: str, split: str, dataset: Dataset[Any], class_names: Sequence[str]
    ) -> None:
        self.root = root
        self.split = split
        self.dataset = dataset
        self.class_names = list(class_names)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def name(self, index: int) -> str:
        return f"{self.root}/{self.split}/{index}"

    def __getitem__(self, index: int) -> tuple[RawImage, int]:
        """As in `Samples`. Any other error ends the run, as does a UserError when the data set gives no pair."""
        name = self.name(index)
        try:
            item = self.dataset[index]
        except Exception as error:
            if not UnreadableImageError.is_said_by(error):
                raise
            raise UnreadableImageError(f"cannot read the image {name}: {error}") from error
        try:
            image, label = item
            label = operator.index(label)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name} is not a pair of an image and a class index") from error
        check_raw(image, f"the image of {name}")
        if not NO_LABEL <= label < len(self.class_names):
            raise UserError(
                f"{name} has the label {label}, there are {len(self.class_names)} classes"
            )
        return image, label


def seed_generators(seed: int, device: str = "cpu") -> None:
    """Seed the global generators of `random`, numpy and torch, on a kind of device too.

    Transforms draw from them, and so may all that a user writes.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: without CUDA it formats a traceback in every call, a millisecond per image.
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@dataclass(eq=False)
class TrainImages(Dataset[tuple[Any, int]]):
    """Augmented images, indexed by (epoch, index, repeat).

    The global generators are seeded before every image is opened and again before it is transformed, so the worker does
    not matter. For an image that cannot be read, noted in `unreadable`, another stands in, drawn from the same key.
    """

    samples: Samples
    open_image: Callable[[RawImage, str, bool], Any]
    """Takes an image as it is in `samples`, its name, and whether several crops of it are wanted."""
    transform: Callable[[Any], Any]
    """Takes what `open_image` returns."""
    seed: int
    unreadable: UnreadableImages

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[Any, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[tuple[Any, int]]:
        """The images of a batch; repeats that follow each other share one decoding."""
        items = []
        for index, group in groupby(keys, key=operator.itemgetter(1)):
            repeats = list(group)
            decoded = None
            if len(repeats) > 1:
                with suppress(UnreadableImageError):  # each repeat will meet it again
                    decoded = self._open(index, repeats[0], whole=True)
            items += [self._augmented(key, decoded) for key in repeats]
        return items

    def _open(self, index: int, key: Key, whole: bool = False) -> tuple[Any, int]:
        seed_generators(seeds.image(self.seed, *key))  # a data set of one's own may draw
        raw, label = self.samples[index]
        name = self.samples.name(index)
        if label < 0:
            raise UserError(f"the training image {name} has no label")
        return self.open_image(raw, name, whole), label

    def _augmented(self, key: Key, decoded: tuple[Any, int] | None) -> tuple[Any, int]:
        for attempt in count():  # `unreadable` ends it when there is nothing left to read
            index = self.index(key, attempt)
            try:
                image, label = decoded or self._open(index, key)
                seed_generators(seeds.image(self.seed, *key))
                return channels_last(self.transform(image)), label
            except UnreadableImageError as error:
                self.unreadable.note(self.samples.name(index), str(error))
            decoded = None
        raise AssertionError  # `count` does not end

    def index(self, key: Key, attempt: int) -> int:
        """The image to read for a key: its own first, then at each further attempt another in its place."""
        if attempt == 0:
            return key[1]
        return seeds.stand_in(self.seed, *key, attempt) % len(self.samples)


@dataclass(eq=False)
class EvalImages(Dataset[tuple[Tensor, int]]):
    """Images in order, under a deterministic transform: uint8 [S, S, 3], or float32 [3, S, S] that is normalized.

    An image that cannot be read is noted in `unreadable` and comes black with the label NO_LABEL, as NO_IMAGE does.
    """

    samples: Samples
    transform: Callable[[Any], Tensor]
    """Takes a PIL image or planes, and returns [C, S, S]."""
    unreadable: UnreadableImages
    reading: Reading

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == NO_IMAGE:
            return channels_last(self.transform(self.reading.blank())), NO_LABEL
        seed_generators(seeds.image(0, 0, index, 0))
        name = self.samples.name(index)
        try:
            raw, label = self.samples[index]
            image = load_image(raw, name, self.reading)
        except UnreadableImageError as error:
            self.unreadable.note(name, str(error))
            image = self.reading.blank()
            label = NO_LABEL
        return channels_last(self.transform(image)), label


def channels_last(pixels: Any) -> Any:
    """uint8 [3, S, S] as [S, S, 3], which workers send on; anything else stays as it is."""
    is_image = isinstance(pixels, Tensor) and pixels.dtype == torch.uint8
    return pixels.permute(1, 2, 0) if is_image else pixels
