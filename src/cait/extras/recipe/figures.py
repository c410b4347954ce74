"""What the rules go by: what a folder of images holds, the machine, and the pace of a run, by a trial of few steps."""

import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment

from cait import cores, plugins
from cait.data.datamodule import ImageNetDataModule
from cait.data.folder import FolderSource
from cait.data.reading import AS_SEEN, Reading, open_image
from cait.errors import UserError
from cait.extras import recipe as extra
from cait.extras.frames import thumbnail
from cait.model.network import NetworkSettings
from cait.settings import group, nested
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import CaiTModule

Settings = Mapping[str, Any]
MEASURED, DECODED = 1000, 100
"""Images whose size is read; how many of these are decoded, evenly over the listing."""
WARM_UP, SECONDS, LIMIT = 3, 3.0, 20.0
"""Steps before the clock starts, seconds of steps that are measured, and seconds after which a slow trial ends."""
EPOCH = 0.15
"""Seconds that an epoch takes beside its steps and its validation."""
PROBED, SAMPLE = 128, 500
"""Side of the images in pixels, and how many, on which features and pixels are compared."""
TRIES = (4, 16, 16)
"""Images of the steps at a size: the last step counts, and after one of more than a second none follows."""
CHANNELS = "model.fields.in_chans"
WEIGHTS = {"model.weights", "model.weights_ema", "model.pretrained"}
"""Reading them takes long, and changes no pace."""


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
    if uses_gpu and torch.backends.mps.is_available():  # before CUDA, as Lightning's "auto" looks for it
        return Machine(count, gpus=1)
    if uses_gpu and torch.cuda.is_available():
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)  # T4, V100 and RTX 20 emulate it, slowly
        return Machine(count, torch.cuda.device_count(), is_fast)
    cpuinfo = Path("/proc/cpuinfo")
    has_units = cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text(errors="replace")
    return Machine(count, fast_bf16=has_units)  # without Intel's units for matrices in bfloat16, it is slow


def survey(source: FolderSource, reading: Reading = AS_SEEN) -> Survey:
    """Count the images, and open a sample as `reading` says. Raises UserError if not one of it can be read."""
    train = source.train
    label_sets = getattr(source, "label_sets", None)
    labels = source.class_names if label_sets is None else label_sets
    counts = np.bincount(train.labels, minlength=len(labels))
    if label_sets is not None:  # a row of 0 and 1 for each label, the classes that it stands for
        counts = counts @ np.asarray(label_sets)
    looked_at = range(0, len(train), max(1, len(train) // MEASURED))
    decoded = {*looked_at[:: max(1, len(looked_at) // DECODED)]}
    sides, megapixels, thumbs = [], [], []
    for index in looked_at:
        # A run counts and names those that cannot be read.
        with contextlib.suppress(Exception), open_image(train.name(index)) as image:
            sides.append(min(image.size))
            megapixels.append(image.width * image.height / 1e6)
            if index in decoded:
                thumbs.append(thumbnail(image, reading))
    if not thumbs:
        raise UserError(f"none of {len(train):,} images can be read, as {train.name(0)}")
    pixels = np.stack(thumbs)
    spread = np.abs(pixels - pixels.mean(axis=3, keepdims=True)).mean(axis=(1, 2, 3))
    gray = bool((spread < 2).mean() >= 0.95)  # in nearly all images the channels differ by less than 2 of 255
    axes = (0, 1, 2, 3) if gray else (0, 1, 2)  # all channels alike if the images are gray
    mean = np.broadcast_to(pixels.mean(axis=axes) / 255, 3)
    std = np.broadcast_to(pixels.std(axis=axes) / 255, 3)
    return Survey(
        counts=dict(zip(source.class_names, counts.astype(int).tolist(), strict=True)),
        several=None if label_sets is None else len(train),
        val=len(source.val),
        side=int(statistics.median(sides)),
        megapixels=statistics.mean(megapixels),
        gray=gray,
        mean=tuple(round(float(value), 3) for value in mean),
        std=tuple(round(max(float(value), 0.01), 3) for value in std),
    )


@dataclass(frozen=True)
class Pace:
    """How fast a run is, in seconds."""

    image: float
    """Train on one image. Validation takes a third: it goes forwards alone."""
    start: float = 20.0
    """From the command to the first step, and from the last step to the end."""

    def plan(self, minutes: float, images: int, val: int, most: int) -> tuple[float, int]:
        """The epochs of `images` images that fit into `minutes`, at most `most`, and how often to validate on `val`.

        Less than one epoch is a fraction. Validation takes at most 15 % of the time and comes at most 30 times.
        """
        time = max(60 * minutes - self.start, 20 * minutes)
        epoch, validation = images * self.image + EPOCH, val * self.image / 3
        validations = max(1, min(30, int(0.15 * time / validation)))
        each_validated = min(validations, time / (epoch + validation))
        fitting = max((time - validations * validation) / epoch, each_validated)
        if fitting < 1:
            return fitting, 1
        epochs = min(most, int(fitting))
        return epochs - epochs % max(1, epochs // validations), validations

    def seconds(self, epochs: float, images: int, val: int, validations: float) -> float:
        """The length of a run, from the command to its end."""
        return self.start + epochs * (images * self.image + EPOCH) + validations * val * self.image / 3


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Measure without a line on the screen. None if it fails, whatever settings or networks are given."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    hush = contextlib.redirect_stdout(io.StringIO())
    try:
        with warnings.catch_warnings(action="ignore"), hush, contextlib.suppress(Exception):
            yield
    finally:
        logging.disable(before)


class Trial:
    """Measures what a recipe has chosen so far, on this machine, now. With several devices, one does its part."""

    def begun(self) -> float:
        """Seconds since the command."""
        return time.monotonic() - extra.BEGUN

    @quietly()
    def step(self, held: Settings, size: int) -> float | None:
        """Seconds to train the network on an image of `size` pixels, without the optimizer; None if it takes none."""
        settings = nested(held).get("model", {}) | {"img_size": size, "num_classes": 2}
        network = group(NetworkSettings, settings).build()
        trainer = trainer_of(held)
        device = trainer.strategy.root_device
        network.to(device).train()
        for count in TRIES:
            images = torch.zeros(count, held.get(CHANNELS, 3), size, size, device=device)
            begin = time.monotonic()
            with trainer.precision_plugin.forward_context():
                loss = network(images).float().sum()
            loss.backward()
            loss.item()  # waits for a GPU
            if (seconds := time.monotonic() - begin) > 1:
                break
        return seconds / count

    @quietly()
    def run(self, held: Settings) -> Pace | None:
        """The pace of the run, with all that a step of it needs; None if it cannot run, which the run then reports."""
        devices = devices_of(held)
        batch = max(2, held["data.batch_size"] // devices // 2 * 2)
        fresh = {name: value for name, value in held.items() if name not in WEIGHTS}
        data, module = modules(fresh, batch_size=batch, global_batch=False)
        times = [time.monotonic()]

        def stamp(trainer: Trainer, *_: Any) -> None:
            if trainer.strategy.root_device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.monotonic())
            measured = times[-1] - times[min(WARM_UP, len(times) - 1)]
            is_slow = measured > 0 and times[-1] - times[0] > LIMIT
            trainer.should_stop = measured >= SECONDS or is_slow

        callbacks: list[Callback] = [LambdaCallback(on_train_batch_end=stamp), StepSeed(0)]
        if held.get("ema.decay"):
            callbacks.append(EMA(held["ema.decay"], held.get("ema.initial", False)))
        for make in plugins.of_kind("step_callbacks"):
            callbacks += make(data)
        trainer_of(held, callbacks).fit(module, datamodule=data)
        steps = len(times) - 1 - WARM_UP
        seconds = (times[-1] - times[WARM_UP]) / steps / batch / devices
        return Pace(seconds, 1.25 * self.begun())  # its end takes a quarter of its start

    def domain(self, held: Settings) -> tuple[float, float] | None:
        """`compare` by the weights. Raises UserError if they are of another network."""
        loaded = quietly()(modules)(held, img_size=PROBED)
        if loaded is None:
            return None
        data, module = loaded
        try:
            with warnings.catch_warnings(action="ignore"):
                module.initial_weights.load(module.model, module.name)
        except UserError as error:
            raise UserError(f"{error}; --model.name says which network to train, here {module.name}") from error
        return compare(data, module, held)


@quietly()
def compare(data: ImageNetDataModule, module: CaiTModule, held: Settings) -> tuple[float, float] | None:
    """Top-1, in percent, of logistic regressions on a network's features and on the pixels; None if there are none.

    Both learn from a sample of the training images, and answer a fifth of it.
    """
    from cait.extras.features import classify, evenly, extract

    samples = data.source.train
    device = trainer_of(held).strategy.root_device
    sample = evenly(len(samples), SAMPLE)
    seen = extract(module.model, samples, data, device, sample, pixels=True)
    asked = np.arange(len(seen.kept)) % 5 == 4
    scores = []
    for rows in (seen.features, seen.pixels[..., ::2, ::2].reshape(len(asked), -1)):
        answers = classify(rows[~asked], seen.labels[~asked], rows[asked], data.num_classes)
        scores.append(100 * float((answers == seen.labels[asked]).mean()))
    return scores[0], scores[1]


def modules(held: Settings, **of_data: Any) -> tuple[ImageNetDataModule, CaiTModule]:
    """The run's data module, with some settings of its own, and its LightningModule."""
    data = ImageNetDataModule(**data_arguments(held) | of_data)
    data.setup("validate")
    sizes = dict(img_size=data.img_size, num_classes=data.num_classes, task=data.task)
    return data, CaiTModule(**nested(held).get("model", {}) | sizes)


def data_arguments(settings: Settings) -> dict[str, Any]:
    """Those of the data module, which gets the channels of the network."""
    return nested(settings).get("data", {}) | {"in_chans": settings.get(CHANNELS, 3)}


def devices_of(held: Settings) -> int:
    """The devices that the settings name; 1 if they leave it to Lightning."""
    devices = str(held.get("trainer.devices"))
    return max(1, int(devices)) if devices.isdecimal() else 1


def trainer_of(held: Settings, callbacks: Sequence[Callback] = ()) -> Trainer:
    """A quiet Trainer of one device, also in a process that torchrun has started."""
    names = ("accelerator", "precision")
    chosen = {name: held[f"trainer.{name}"] for name in names if f"trainer.{name}" in held}
    return Trainer(
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_steps=100_000,
        limit_val_batches=0,
        devices=1,
        use_distributed_sampler=False,
        plugins=[LightningEnvironment()],
        **chosen,
    )
