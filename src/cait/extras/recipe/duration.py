"""How long a run on a folder takes: what the recipe plans with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MINUTES = 3.0
"""Length of a run unless --minutes says another, from the command to its end."""
EPOCH = 0.15
"""Seconds that an epoch takes beside its steps and its validation."""
COPIES = "data/cache/copies"


@dataclass(frozen=True)
class Machine:
    """What the run trains on."""

    cores: int
    gpus: int = 0
    fast_bf16: bool = False
    """Whether it multiplies matrices in bfloat16 much faster than in float32."""
    free: float = 100.0
    """Disk for copies, in 10⁹ bytes: what is free, and what earlier copies take."""


def this_machine(given: Mapping[str, Any]) -> Machine:
    """What a run with the settings `given` trains on."""
    import torch

    from cait.cores import share

    copies = Path(str(given.get("data.copies_dir") or COPIES))
    disk = next(place for place in (copies, *copies.absolute().parents) if place.is_dir())
    free = (shutil.disk_usage(disk).free + sum(path.stat().st_size for path in copies.rglob("*.ppm"))) / 1e9
    on_cpu, has_mps = given.get("trainer.accelerator") == "cpu", torch.backends.mps.is_available()
    if has_mps and not on_cpu:  # before CUDA, as Lightning's "auto" looks for it
        return Machine(share(1), 1, free=free)
    if on_cpu or not torch.cuda.is_available():
        cpuinfo = Path("/proc/cpuinfo")  # without Intel's units for matrices in bfloat16, it is slow
        has_amx = cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text(errors="replace")
        return Machine(share(1), fast_bf16=has_amx, free=free)
    in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)  # T4, V100 and RTX 20 emulate it, slowly
    return Machine(share(1), torch.cuda.device_count(), in_hardware, free)


@dataclass(frozen=True)
class Pace:
    """How fast a run is, in seconds."""

    image: float
    """Train on one image."""
    validation: float
    """Validate once."""
    copying: float = 0.0
    """Make the small copies of all images, once."""
    start: float = 20.0
    """From the command to the first step, and from the last step to the end."""
    is_measured: bool = False

    def plan(self, minutes: float, images: int, most: int) -> tuple[float, int]:
        """The epochs of `images` images that fit into `minutes`, at most `most`, and how often to validate.

        Less than one epoch is a fraction. Validation takes at most 15 % of the time and comes at most 30 times. However
        long copying takes, half of the time is left.
        """
        time = max(60 * minutes - self.start, 20 * minutes)
        time = max(time / 2, time - self.copying)
        validations = max(1, min(30, int(0.15 * time / max(self.validation, 1e-9))))
        epoch = images * self.image + EPOCH
        each_validated = min(validations, time / (epoch + self.validation))
        fitting = max((time - validations * self.validation) / epoch, each_validated)
        if fitting < 1:
            return fitting, 1
        epochs = min(most, int(fitting))
        return epochs - epochs % max(1, epochs // validations), validations

    def seconds(self, epochs: float, images: int, validations: float) -> float:
        """The length of a run, from the command to its end."""
        return self.start + self.copying + epochs * (images * self.image + EPOCH) + validations * self.validation


def copied(shrink: int) -> float:
    """Megapixels of an image that was halved down to `shrink`: its sides are up to twice as long."""
    return 3 * shrink**2 / 1e6
