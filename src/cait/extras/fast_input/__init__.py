"""The fastest input: decode only the crop of an image, augment arrays, hand over batches in shared memory.

Without this folder timm's own transform makes the training images, and batches go from the workers in PyTorch's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cait.errors import UserError
from cait.settings import check_at_least, check_choice


@dataclass(frozen=True)
class FastInput:
    """How workers read training images, and where these are augmented.

    Raises:
        UserError: a setting is out of range.
    """

    read_ahead: int = 0
    """Threads in each worker that read the images of a batch while others are decoded. 8 suit network file
    systems that answer slowly. 0 reads one after the other, which is best for files in memory."""
    augment_on: Literal["worker", "device"] = "worker"
    """Where RandAugment or AutoAugment and the flip are done. With "device" workers send what they drew, and the pixels
    change on the GPU, before they are normalised. The draws are the same; on a GPU a few pixels differ by a level."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "read_ahead")
        check_choice(self, {"augment_on": ("worker", "device")})


LEARNT = ("data.augment_on",)
DATA_SETTINGS = "cait.extras.fast_input:FastInput"


def wrap_samples(samples: Any, settings: Mapping[str, Any]) -> Any:
    if settings["read_ahead"] == 0:
        return samples
    from cait.extras.fast_input.ahead import Ahead

    return Ahead(samples, settings["read_ahead"])


def train_pipeline(preprocessing: Any, augmentation: Any, settings: Mapping[str, Any]) -> Any:
    on_device = settings["augment_on"] == "device"
    if settings["backend"] == "timm":
        if on_device:
            raise UserError("--data.augment_on device: backend timm is timm's own transform, in the workers; take auto")
        return None
    from cait.extras.fast_input.augment import Augment
    from cait.extras.fast_input.decode import choose

    decoder = choose(settings["backend"])
    if on_device:
        from cait.extras.fast_input.on_device import AugmentOnDevice

        return AugmentOnDevice(decoder, preprocessing, augmentation)
    return Augment(decoder, preprocessing, augmentation)


def collate(workers: int, ready: int, size: int) -> Any:
    from functools import partial

    from cait.extras.fast_input.batches import HELD, SharedBatches, collate

    memory = SharedBatches(workers, ready + HELD, size) if workers and SharedBatches.possible() else None
    return partial(collate, memory=memory)
