"""How long a run on a folder takes, by the machine and the images: what the recipe plans with."""

from __future__ import annotations

from dataclasses import dataclass

from cait.extras.recipe.survey import Survey

MINUTES = 3.0
"""A run on the CPU is planned to last this long on cores of its own, so that it ends in 5 minutes on slower ones."""
COPY = 3.0
"""Pixels of a halved image, as a multiple of the square of `data.shrink`: its sides are up to twice as long."""


@dataclass(frozen=True)
class Machine:
    """What the run trains on."""

    cores: int
    gpus: int = 0
    fast_bf16: bool = False
    """Whether it multiplies matrices in bfloat16 much faster than in float32."""
    free: float = 100.0
    """Free disk, in 10⁹ bytes."""


@dataclass(frozen=True)
class Work:
    """How long things take, in processor seconds or in seconds of the GPUs.

    Args:
        shrink: `data.shrink`.
        kept: whether copies of the halved images are kept.
    """

    folder: Survey
    machine: Machine
    shrink: int | None = None
    kept: bool = False

    def opening(self) -> float:
        """Of the processor, to decode an image and to halve it."""
        return 0.02 * (self.folder.megapixels - self.folder.jpeg) + 0.004 * self.folder.jpeg

    def copies(self) -> float:
        """To make the copies, once."""
        images = self.folder.images + self.folder.val if self.kept else 0
        return images * self.opening() / (self.machine.cores if self.machine.gpus else 1)

    def reading(self) -> float:
        """Of the processor, to decode and augment an image in each epoch."""
        if self.shrink is None:
            return 0.0006 + 0.015 * self.folder.megapixels
        small = 0.0006 + 0.015 * min(self.folder.megapixels, copied(self.shrink))
        return small if self.kept else small + self.opening()

    def image(self, cost: float) -> float:
        """For an image in training: a network of `cost` GMACs, and reading."""
        if self.machine.gpus:
            return max(6 * cost / (15_000 * self.machine.gpus), self.reading() / self.machine.cores)
        return 6 * cost / (75 if self.machine.fast_bf16 else 45) + self.reading()

    def validation(self) -> float:
        """For a validation, without the network: small networks take next to none."""
        return self.folder.val * self.reading() / (self.machine.cores if self.machine.gpus else 1)

    def budget(self) -> float:
        """That training may take; a fifth of the time goes into the start, validation and checkpoints."""
        return 0.8 * 60 * MINUTES * self.at_once()

    def at_once(self) -> int:
        """How many of these seconds pass in one second."""
        return 1 if self.machine.gpus else min(self.machine.cores, 8)

    def epochs(self, cost: float) -> float:
        """Epochs of a network of `cost` GMACs that fit into the time; half of it is theirs in any case."""
        return max(self.budget() / 2, self.budget() - self.copies()) / (self.folder.images * self.image(cost))


def copied(shrink: int) -> float:
    """Megapixels of an image that was halved down to `shrink`."""
    return COPY * shrink**2 / 1e6


def xxs24(size: int) -> float:
    """10⁹ multiplications of XXS-24, and of networks like it, for an image of this size."""
    return 2.5 * (size / 224) ** 2


def gmacs(size: int, patch: int, width: int, depth: int) -> float:
    """10⁹ multiplications of a CaiT for one image: linear layers and attention of its blocks."""
    tokens = (size // patch) ** 2
    return (depth * (12 * width**2 * tokens + 2 * width * tokens**2) + 4 * width**2 * tokens) / 1e9
