"""How long a run on a folder takes, by the machine and the images: what the recipe plans with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cait.extras.recipe.survey import Survey

MINUTES = 3.0
"""Length of a run unless --minutes says another, from the command to its end."""
EPOCH, START = 0.15, 20.0
"""Seconds that an epoch takes beside its steps and its validation, and a run beside its epochs."""
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
    """How fast a run is, in seconds: as planned by `Work`, or as measured by `cait.extras.recipe.trial`."""

    image: float
    """Train on one image."""
    validation: float
    """Validate once."""
    copying: float = 0.0
    """Make the small copies of all images, once."""
    start: float = START
    """From the command to the first step, and from the last step to the end."""
    is_measured: bool = False

    def plan(self, minutes: float, images: int, most: int) -> tuple[int, int]:
        """The epochs of `images` images that fit into `minutes`, at most `most`, and how often to validate.

        Validation takes at most 15 % of the time and comes at most 30 times. However long copying takes, half of the
        time is left.
        """
        time = max(60 * minutes - self.start, 20 * minutes)
        time = max(time / 2, time - self.copying)
        validations = max(1, min(30, int(0.15 * time / max(self.validation, 1e-9))))
        epoch = images * self.image + EPOCH
        fitting = max(
            (time - validations * self.validation) / epoch, min(validations, time / (epoch + self.validation))
        )
        epochs = max(1, min(most, int(fitting)))
        return epochs - epochs % max(1, epochs // validations), validations

    def seconds(self, epochs: int, images: int, validations: float) -> float:
        """The length of a run, from the command to its end."""
        return self.start + self.copying + epochs * (images * self.image + EPOCH) + validations * self.validation


@dataclass(frozen=True)
class Work:
    """How long parts of a run take, in seconds of a GPU, or of one core where there is none."""

    folder: Survey
    machine: Machine
    shrink: int | None = None
    """As `data.shrink`."""
    kept: bool = False
    """Whether copies of the halved images are kept."""
    minutes: float = MINUTES
    """As long as the run may take."""

    def halving(self) -> float:
        """Decode one image and halve it, on a core."""
        return 0.02 * (self.folder.megapixels - self.folder.jpeg) + 0.004 * self.folder.jpeg

    def copying(self) -> float:
        """Make the copies, once."""
        images = self.folder.images + self.folder.val if self.kept else 0
        return images * self.halving() / (self.machine.cores if self.machine.gpus else 1)

    def reading(self) -> float:
        """Decode and augment one image, on a core; each epoch does."""
        if self.shrink is None:
            return 0.0006 + 0.015 * self.folder.megapixels
        small = 0.0006 + 0.015 * min(self.folder.megapixels, copied(self.shrink))
        return small if self.kept else small + self.halving()

    def training(self, cost: float) -> float:
        """Train on one image: read it, and pass it through a network of `cost` GMACs."""
        if self.machine.gpus:
            return max(6 * cost / (15_000 * self.machine.gpus), self.reading() / self.machine.cores)
        return 6 * cost / (75 if self.machine.fast_bf16 else 45) + self.reading()

    def validation(self) -> float:
        """Validate once, without the network: small networks take next to no time."""
        return self.folder.val * self.reading() / (self.machine.cores if self.machine.gpus else 1)

    def budget(self) -> float:
        """The time for training. A fifth of the run goes into its start, validation and checkpoints."""
        return 0.8 * 60 * self.minutes * self.parallel()

    def parallel(self) -> int:
        """Seconds of work that are done in one second: cores work side by side, and more than 8 gain nothing."""
        return 1 if self.machine.gpus else min(self.machine.cores, 8)

    def epochs(self, cost: float) -> float:
        """Epochs of a network of `cost` GMACs that fit into the budget. However long copying takes, half is left."""
        return max(self.budget() / 2, self.budget() - self.copying()) / (self.folder.images * self.training(cost))

    def pace(self, cost: float) -> Pace:
        """The planned pace of a network of `cost` GMACs."""
        at_once = self.parallel()
        return Pace(self.training(cost) / at_once, self.validation() / at_once, self.copying() / at_once)


def copied(shrink: int) -> float:
    """Megapixels of an image that was halved down to `shrink`: its sides are up to twice as long."""
    return 3 * shrink**2 / 1e6


def xxs24(size: int) -> float:
    """10⁹ multiplications of XXS-24, and of networks like it, for an image of this size."""
    return 2.5 * (size / 224) ** 2
