"""What the rules go by: what a folder of images holds, by its listing and a sample of it, and the machine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cait.data.listing import Files
from cait.data.reading import AS_SEEN, Reading, load_rgb, open_image
from cait.errors import UserError

SIZES, SAMPLE = 1000, 100
"""Images whose size is read, and how many of these are decoded, evenly over the listing."""
THUMB = 32
MINUTES = 3.0
"""Length of a run unless --minutes says another, from the command to its end."""


@dataclass(frozen=True)
class Survey:
    """A folder of images in figures."""

    counts: dict[str, int]
    """Training images by class."""
    val: int
    """Validation images."""
    side: int
    """Median of the shorter sides, in pixels."""
    megapixels: float
    """Mean of the images' sizes. A median would hide a few huge images, which take most of the time."""
    grey: bool
    """Whether nearly all images are grey."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean of each channel, of pixels in [0, 1]."""
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    """Standard deviation of each channel, likewise."""
    several: int | None = None
    """Training images, if they may have several classes."""

    @property
    def images(self) -> int:
        return sum(self.counts.values()) if self.several is None else self.several

    @property
    def unevenness(self) -> float:
        """How many times larger than the smallest class the largest is."""
        return max(self.counts.values()) / max(1, min(self.counts.values()))


@dataclass(frozen=True)
class Machine:
    """What the run trains on."""

    cores: int
    gpus: int = 0
    fast_bf16: bool = False
    """Whether it multiplies matrices in bfloat16 much faster than in float32."""


def this_machine(given: Mapping[str, Any]) -> Machine:
    """What a run with the settings `given` trains on."""
    import torch

    from cait.cores import share

    machine = Machine(share(1))
    if given.get("trainer.accelerator") != "cpu":
        if torch.backends.mps.is_available():  # before CUDA, as Lightning's "auto" looks for it
            return replace(machine, gpus=1)
        if torch.cuda.is_available():  # T4, V100 and RTX 20 emulate bfloat16, slowly
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
            return replace(machine, gpus=torch.cuda.device_count(), fast_bf16=is_fast)
    cpuinfo = Path("/proc/cpuinfo")  # without Intel's units for matrices in bfloat16, it is slow
    has_amx = cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text(errors="replace")
    return replace(machine, fast_bf16=has_amx)


def survey(
    train: Files, val: Files, names: Sequence[str], reading: Reading = AS_SEEN, label_sets: Any = None
) -> Survey:
    """Count the images, and open a sample as `reading` says. Raises UserError if not one of it can be read.

    Args:
        label_sets: rows of 0 and 1, the classes that each label stands for if it may be several.
    """
    counted = Counter(train.labels)
    if label_sets is not None:
        of_labels = np.array([counted[label] for label in range(len(label_sets))])
        counted = Counter(dict(enumerate((of_labels @ np.asarray(label_sets)).astype(int).tolist())))
    looked_at = range(0, len(train), max(1, len(train) // SIZES))
    decoded = {*looked_at[:: max(1, len(looked_at) // SAMPLE)]}
    sides, megapixels, thumbs = [], [], []
    for index in looked_at:
        with suppress(Exception), open_image(train.name(index)) as image:  # a run counts and names the unreadable ones
            sides.append(min(image.size))
            megapixels.append(image.width * image.height / 1e6)
            if index in decoded:
                image.draft("RGB", (2 * THUMB, 2 * THUMB))  # of a JPEG file decode an eighth
                thumbs.append(np.asarray(load_rgb(image, reading=reading).resize((THUMB, THUMB)), np.float32))
    if not thumbs:
        raise UserError(f"none of {len(train):,} images can be read, as {train.name(0)}")
    pixels = np.stack(thumbs)
    spread = np.abs(pixels - pixels.mean(axis=3, keepdims=True)).mean(axis=(1, 2, 3))
    grey = bool((spread < 2).mean() >= 0.95)  # in nearly all images the channels differ by less than 2 of 255
    axes = (0, 1, 2, 3) if grey else (0, 1, 2)  # all channels alike if the images are grey
    mean, std = (np.broadcast_to(figure / 255, 3) for figure in (pixels.mean(axis=axes), pixels.std(axis=axes)))
    return Survey(
        counts={name: counted[label] for label, name in enumerate(names)},
        several=None if label_sets is None else len(train),
        val=len(val),
        side=int(statistics.median(sides)),
        megapixels=statistics.mean(megapixels),
        grey=grey,
        mean=tuple(round(float(value), 3) for value in mean),
        std=tuple(round(max(float(value), 0.01), 3) for value in std),
    )
