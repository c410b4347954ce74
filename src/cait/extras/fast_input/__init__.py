"""The fastest input: decode only the crop of an image, augment arrays, hand over batches in shared memory.

Without this folder timm's own transform makes the training images, and batches go from the workers in PyTorch's way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def train_pipeline(preprocessing: Any, augmentation: Any, settings: Mapping[str, Any]) -> Any:
    if settings["backend"] == "timm":
        return None
    from cait.extras.fast_input.augment import Augment
    from cait.extras.fast_input.decode import choose

    return Augment(choose(settings["backend"]), preprocessing, augmentation)


def collate(workers: int, ready: int, size: int) -> Any:
    from functools import partial

    from cait.extras.fast_input.batches import HELD, SharedBatches, collate

    memory = SharedBatches(workers, ready + HELD, size) if workers and SharedBatches.possible() else None
    return partial(collate, memory=memory)
