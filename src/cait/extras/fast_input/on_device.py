"""The training transform whose policy is noted in a worker and done on the device."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from timm.data.auto_augment import NAME_TO_OP, RandAugment
from torch import Tensor

from cait.data.dataset import Samples
from cait.data.transforms import Augmentation, Erased, Preprocessing
from cait.errors import UserError
from cait.extras.fast_input.augment import Augment, operations
from cait.extras.fast_input.decode import Decoder, OpenImage
from cait.extras.fast_input.steps import STEP, Note, apply, record


class AugmentOnDevice(Augment):
    """Crop in the worker, draw what `Augment` draws in its order, and do the flip and the policy on the device.

    On the CPU the pixels are those of `Augment`, to the bit. A GPU does them in one kernel, see kernel.py.

    Raises:
        UserError: there is an operation that the device does not know.
    """

    name = "cait, augmented on the device"

    def __init__(self, backend: Decoder, preprocessing: Preprocessing, augmentation: Augmentation) -> None:
        super().__init__(backend, preprocessing, augmentation)
        ops = list(chain.from_iterable(map(operations, self.array_ops)))
        names = [op.name for op in ops if not Note.knows(NAME_TO_OP[op.name], op.kwargs["resample"])]
        names += [type(op).__name__ for op in self.image_ops]
        if names:
            raise UserError(
                f"--data.augment_on device cannot do {', '.join(sorted({*names}))} with {self.interpolation} "
                "interpolation; leave it to the workers"
            )
        self.places = sum(_longest(part) for part in self.array_ops) or 1
        self.fill_color: Any = tuple(next((op.kwargs["fillcolor"] for op in ops), (0, 0, 0)))
        for op in ops:
            op.aug_fn = Note(NAME_TO_OP[op.name], self.size[0])

    def how_read(self, samples: Samples) -> str:
        return f"{super().how_read(samples)}; the device augments"

    def __call__(self, image: OpenImage) -> tuple[Tensor, Erased | None, np.ndarray]:  # type: ignore[override]
        """Pixels uint8 [S, S, 3], only cropped; what to erase; and the steps to do before, bytes [steps · 312]."""
        pixels, flips = self.crop(image), self.flips()
        steps: list[Any] = []
        for part in self.array_ops:
            steps = part(steps)
        return pixels, self._erased(), record(steps, self.places, flips).view(np.uint8)

    def augment(self, images: Tensor, steps: Tensor) -> Tensor:
        """Do the steps, uint8 [B, steps · 312], on images uint8 [B, S, S, 3]."""
        if images.device.type == "cuda":
            from cait.extras.fast_input.kernel import augment

            return augment(images, steps, *self.fill_color)
        if images.device.type != "cpu":
            raise UserError(f"--data.augment_on device is for CUDA and the CPU, not for {images.device.type}")
        changed = []
        for pixels, noted in zip(images.numpy(), steps.numpy().view(STEP), strict=True):
            for step in noted:
                pixels = apply(pixels, step, self.fill_color)
            changed.append(torch.from_numpy(np.ascontiguousarray(pixels)))
        return torch.stack(changed)


def _longest(part: Any) -> int:
    """The most operations that a policy does on an image."""
    return part.num_layers if isinstance(part, RandAugment) else max(map(len, part.policy))
