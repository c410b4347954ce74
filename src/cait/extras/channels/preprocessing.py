"""How planes are read and prepared: the settings, and the transforms that they make."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import Compose

from cait.data.reading import Reading
from cait.data.transforms import Augmentation, Preprocessing
from cait.errors import UserError
from cait.references import locate
from cait.settings import OneOf, Settings

FILTERS = OneOf(("nearest", "bilinear", "bicubic"))
"""What torch resizes planes with."""


@dataclass(frozen=True)
class PlanesReading(Reading):
    """How a file becomes RGB, or by a `reader` planes of numbers."""

    reader: str | None = None  # type: ignore[misc]  # always None in the core
    """What reads images in Pillow's place, as "package.module:function". It is called with an image, mostly a path, and
    a `Reading`, and returns planes, float32 [in_chans, height, width], NaN where a number is missing."""
    reader_args: dict[str, Any] | None = None
    """Arguments for `reader`, which finds them in the `Reading` that it gets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reader_args and self.reader is None:
            raise UserError("data.reader_args are for data.reader, which is not set")

    @property
    def channels(self) -> int:
        return super().channels if self.reader is None else self.in_chans

    def read(self, image: Any) -> Any:
        """An image in RGB, or planes; `in_chans` 0 takes any number of them. Raises any kind of error."""
        if self.reader is None:
            return super().read(image)
        planes = locate(self.reader)(image, self)
        if not isinstance(planes, Tensor) or planes.ndim != 3:
            raise UserError(
                f"the reader {self.reader} must return a tensor [in_chans, height, width], not {type(planes).__name__}"
            )
        if self.in_chans not in (0, len(planes)):  # one channel would pass for any number
            raise ValueError(f"it has {len(planes)} channels, not {self.in_chans}")
        return planes

    def blank(self) -> Any:
        return super().blank() if self.reader is None else torch.zeros(self.in_chans, 8, 8)


@dataclass(frozen=True)
class Planes(PlanesReading, Preprocessing):
    """How an image becomes the network's input; planes are normalized first, then as timm transforms images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reader is not None:
            FILTERS.check("interpolation", self.interpolation)

    def transform(self) -> Compose:
        """timm's evaluation transform, from planes to normalized float32 [C, S, S]."""
        transform = super().transform()
        if self.reader is not None:
            if self.fit == "pad":
                transform.transforms[1].fill = 0  # the mean
            transform.transforms.insert(0, self.normalize)
        return transform

    def train_transform(self, augmentation: Augmentation) -> Compose:
        """timm's training transform, from planes to normalized float32 [C, S, S]."""
        transform = super().train_transform(augmentation)
        if self.reader is not None:
            if augmentation.auto_augment or augmentation.color_jitter:
                raise UserError(
                    "auto_augment and color_jitter are for RGB: beside data.reader set both to null"
                )
            transform.transforms.insert(0, self.normalize)
        return transform

    def normalize(self, planes: Tensor) -> Tensor:
        """Normalize planes of any size; a missing number becomes 0, the mean."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return ((planes - mean) / std).nan_to_num(0.0, 0.0, 0.0)

    def timms(self) -> Settings:
        settings = super().timms()
        if self.reader is None:
            return settings
        return settings | dict(
            input_size=(self.in_chans, self.img_size, self.img_size), mean=(0.0,), std=(1.0,)
        )
