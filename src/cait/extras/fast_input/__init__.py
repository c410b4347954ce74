"""The fastest input: decode only the crop of an image, and augment arrays.

Without this folder timm's own transform makes the training images.
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
