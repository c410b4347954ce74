"""Augment on the device: workers only decode, crop and draw; a kernel does the policy on the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cait.errors import UserError
from cait.settings import check_choice


@dataclass(frozen=True)
class Place:
    """Where training images are augmented."""

    augment_on: Literal["worker", "device"] = "worker"
    """Where RandAugment or AutoAugment and the flip are done. With "device" workers send what they drew, and the pixels
    change on the GPU, before they are normalised. The draws are the same; on a GPU a few pixels differ by a level."""

    def __post_init__(self) -> None:
        check_choice(self, {"augment_on": ("worker", "device")})


DATA_SETTINGS = "cait.extras.device_augment:Place"


def train_pipeline(preprocessing: Any, augmentation: Any, settings: Mapping[str, Any]) -> Any:
    """The pipeline whose workers only draw, if the settings ask for it.

    Raises:
        UserError: the device cannot do this policy, or the backend is timm.
    """
    if settings["augment_on"] == "worker":
        return None
    if settings["backend"] == "timm":
        raise UserError("--data.augment_on device: backend timm is timm's own transform, in the workers; take auto")
    try:
        from cait.extras.device_augment.pipeline import DeviceAugment
        from cait.extras.fast_input.decode import choose
    except ImportError as error:
        raise UserError(f"--data.augment_on device needs the extra fast_input: {error}") from error

    return DeviceAugment(choose(settings["backend"]), preprocessing, augmentation)
