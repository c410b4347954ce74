"""What the rules go by: what a folder of images holds, the machine, and its pace, by a few steps of a network."""

import contextlib
import io
import logging
import math
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from PIL import Image
from torch import nn

from cait import cores
from cait.data.folder import FolderSource
from cait.data.reading import AS_SEEN, Reading, load_image, open_image
from cait.errors import UserError
from cait.extras.features import evenly
from cait.extras.frames import thumbnail
from cait.extras.networks import lower_keys
from cait.extras.recipe.weights import CHANNELS
from cait.model.network import InitialWeights, NetworkSettings
from cait.model.weights import HEAD_ANEW
from cait.run.program import Program
from cait.settings import Settings, group, nested

SAMPLE = 100
"""Images that are looked at, evenly over the listing."""
EPOCH, SETUP = 0.15, 10.0
"""Seconds that an epoch takes beside its steps and its validation; and those to build a run, and to end it."""
OVERHEAD = 1.2
"""How many times as long as its network a step takes: it reads images and moves the weights too."""
MOST_STEPS = 4000
"""A run from scratch has no more, because a small folder gains nothing from them."""
TRIES, LIMIT = (4, 4, 16, 16), 2.0
"""Images of the steps at a size, and seconds after which no pair follows. The fastest step counts: the first of a pair
also chooses kernels, and other work on the machine slows some of them down."""


@dataclass(frozen=True)
class Survey:
    """A folder of images in figures."""

    counts: dict[str, int]
    """Training images by class."""
    val: int
    """Validation images."""
    side: int
    """Median of the shorter sides, in pixels."""
    gray: bool
    """Whether nearly all images are gray."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean of each channel, of pixels in [0, 1]."""
    std: tuple[float, ...] = (0.25, 0.25, 0.25)
    """Standard deviation of each channel, of pixels in [0, 1]."""
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


def this_machine(given: Settings) -> Machine:
    """What a run with the settings `given` trains on."""
    count = cores.share(1)
    uses_gpu = given.get("trainer.accelerator") != "cpu"
    # before CUDA, as Lightning's "auto" looks for it
    if uses_gpu and torch.backends.mps.is_available():
        return Machine(count, gpus=1)
    if uses_gpu and torch.cuda.is_available():
        # T4, V100 and RTX 20 emulate it, slowly
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return Machine(count, torch.cuda.device_count(), is_fast)
    cpuinfo = Path("/proc/cpuinfo")
    # Without Intel's units for matrices in bfloat16, it is slow.
    has_units = cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text(errors="replace")
    return Machine(count, fast_bf16=has_units)


def survey(source: FolderSource, reading: Reading) -> Survey:
    """Count the images, and open a sample as `reading` says. Raises UserError if not one of it can be read."""
    train = source.train
    # a row of 0 and 1 for each label, the classes that it stands for
    label_sets = getattr(source, "label_sets", None)
    if label_sets is None:
        counts = np.bincount(train.labels, minlength=len(source.class_names))
    else:
        counts = np.bincount(train.labels, minlength=len(label_sets)) @ np.asarray(label_sets)
    sides = []
    thumbs = []
    for index in evenly(len(train), SAMPLE):
        # A run counts and names those that cannot be read.
        with contextlib.suppress(Exception), _opened(train.name(index), reading) as image:
            sides.append(min(image.size))
            thumbs.append(thumbnail(image, reading if reading.reader is None else AS_SEEN))
    if not thumbs:
        raise UserError(f"none of {len(train):,} images can be read, as {train.name(0)}")
    pixels = np.stack(thumbs).astype(float)
    spread = np.abs(pixels - pixels.mean(axis=3, keepdims=True)).mean(axis=(1, 2, 3))
    channels = pixels.reshape(-1, 3)
    return Survey(
        counts=dict(zip(source.class_names, counts.astype(int).tolist(), strict=True)),
        several=None if label_sets is None else len(train),
        val=len(source.val),
        side=int(statistics.median(sides)),
        # in nearly all images the channels differ by less than 2 of 255
        gray=bool((spread < 2).mean() >= 0.95),
        mean=tuple((channels.mean(axis=0) / 255).round(3).tolist()),
        std=tuple((channels.std(axis=0) / 255).clip(0.01).round(3).tolist()),
    )


def _opened(name: str, reading: Reading) -> Any:
    """An image that is open; of planes a gray one of their size, whose mean and deviation another extra measures."""
    if reading.reader is None:
        return open_image(name)
    return Image.new("L", load_image(name, reading=reading).shape[:0:-1])


def most_epochs(from_weights: bool, steps: float) -> int:
    """The most epochs of `steps` steps that a run has, whatever the time."""
    return 30 if from_weights else min(200, max(10, int(MOST_STEPS / steps)))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Measure without a line on the screen. None if it fails, whatever settings or networks are given."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    hidden = contextlib.redirect_stdout(io.StringIO())
    try:
        with warnings.catch_warnings(action="ignore"), hidden, contextlib.suppress(Exception):
            yield
    finally:
        logging.disable(before)


class Trial:
    """Measures what a recipe has chosen so far, on this machine, now."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def begun(self) -> float:
        """Seconds since the command."""
        return time.monotonic() - self.program.begun

    @staticmethod
    @quietly()
    def built(held: Settings, size: int = 128, classes: int = 2) -> Any:
        """The network for images of `size` pixels and so many classes; None if it cannot be built."""
        settings = nested(held).get("model", {}) | {"img_size": size, "num_classes": classes}
        return group(NetworkSettings, settings).build_network()

    def takes_head(self, held: Settings, classes: int) -> bool:
        """Whether the weights have a head for so many classes, which is kept.

        Raises UserError if they are of another network than the settings name.
        """
        model = nested(held).get("model", {})
        network = self.built(held, classes=classes)
        if network is None:  # which the run reports
            return False
        name = model.get("name", "xxs24")
        try:
            with warnings.catch_warnings(action="ignore"):
                return HEAD_ANEW not in group(InitialWeights, model).load_into(network, name)
        except UserError as error:
            raise UserError(
                f"{error}; --model.name says which network to train, here {name}"
            ) from error

    def has_depthwise(self, held: Settings) -> bool:
        """Whether the network has convolutions of single channels."""
        network = self.built(held) or nn.Identity()
        convolutions = (layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
        return any(layer.groups == layer.in_channels > 1 for layer in convolutions)

    @quietly()
    def step(self, held: Settings, size: int) -> float | None:
        """Seconds to train the network on an image of `size` pixels, without the optimizer; None if it takes none."""
        network = self.built(held, size)
        # Of one device, also in a process that torchrun has started.
        trainer = Trainer(
            accelerator=held.get("trainer.accelerator", "auto"),
            precision=held.get("trainer.precision"),
            logger=False,
            devices=1,
            plugins=[LightningEnvironment()],
        )
        device = trainer.strategy.root_device
        network.to(device).train()
        share = held.get("model.freeze")
        if isinstance(share, float):
            for key in lower_keys(network, share):
                network.get_parameter(key).requires_grad_(False)
        fastest = math.inf
        start = time.monotonic()
        for number, count in enumerate(TRIES):
            images = torch.zeros(count, held.get(CHANNELS, 3), size, size, device=device)
            begin = time.monotonic()
            with trainer.precision_plugin.forward_context():
                loss = network(images).float().sum()
            loss.backward()
            loss.item()  # waits for a GPU
            fastest = min(fastest, (time.monotonic() - begin) / count)
            if number % 2 and time.monotonic() - start > LIMIT:
                break
        return fastest


def devices_of(held: Settings) -> int:
    """The devices that the settings name; 1 if they leave it to Lightning."""
    devices = str(held.get("trainer.devices"))
    return max(1, int(devices)) if devices.isdecimal() else 1
