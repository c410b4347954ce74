"""A few steps of a chosen run, to measure its pace on this machine, now: its own network, batches and loader."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment

from cait import plugins
from cait.data.datamodule import ImageNetDataModule
from cait.extras.recipe.anatomy import arguments_of
from cait.extras.recipe.survey import Survey
from cait.model.network import NetworkSettings
from cait.settings import flatten
from cait.train.ema import EMA
from cait.train.module import CaiTModule
from cait.train.step_seed import StepSeed

Measured = TypeVar("Measured")
WARM_UP, SECONDS, LIMIT = 3, 3.0, 20.0
"""Steps before the clock starts, seconds of steps that are measured, and seconds after which a slow trial ends."""
EPOCH = 0.15
"""Seconds that an epoch takes beside its steps and its validation."""
PROBED, SAMPLE = 128, 500
"""Side of the images in pixels, and how many, on which features and pixels are compared."""
TRIES = (4, 16, 16)
"""Images of the steps at a size: the last step counts, and after one of more than a second none follows."""
WEIGHTS = {"model.weights", "model.weights_ema", "model.pretrained"}
"""Reading them takes long, and changes no pace."""


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


class Stopwatch(Callback):
    """Time the steps of a trial, and apart from them the first `warm_up` steps."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.first, self.seconds, self.steps = warm_up, 0.0, 0.0, 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            self.begun = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()
        taken = time.monotonic() - self.begun
        if trainer.global_step <= self.warm_up:
            self.first = taken
        else:
            self.steps, self.seconds = trainer.global_step - self.warm_up, taken - self.first
            trainer.should_stop = self.seconds >= SECONDS or taken > LIMIT


class Trial:
    """Measures what a recipe has chosen so far, on this machine, now. With several devices, one does its part."""

    def __init__(self, folder: Survey) -> None:
        self.folder = folder

    def begun(self) -> float:
        """Seconds since the command."""
        return since_command()

    def step(self, recipe: Any, size: int) -> float | None:
        """Seconds to train the network on an image of `size` pixels; None if it does not take such images."""
        return quietly(lambda: time_step(recipe.held(), size))

    def run(self, recipe: Any) -> Pace | None:
        """The pace of the run; None if it cannot run, which the run then reports."""
        return quietly(lambda: time_run(recipe.held(), self.folder))

    def domain(self, recipe: Any) -> tuple[float, float] | None:
        """Top-1 of logistic regressions on the features of the weights and on the pixels; None if there are none."""
        return quietly(lambda: compare(recipe.held()))


def quietly(measure: Callable[[], Measured]) -> Measured | None:
    """What is measured; None if it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            return measure()
    except Exception:  # of many kinds: settings of any value, networks of the user's own
        return None
    finally:
        logging.disable(before)


def compare(held: dict[str, Any]) -> tuple[float, float]:
    """Top-1, in per cent, of logistic regressions on a network's features and on the pixels.

    Both learn from a sample of the training images at `PROBED` pixels, and answer a fifth of it.
    """
    from cait.extras import probes
    from cait.extras.extract import evenly, extract

    data = ImageNetDataModule(**arguments_of(held, "data") | {"img_size": PROBED})
    data.setup("validate")
    module = CaiTModule(**arguments_of(held, "model") | {"img_size": PROBED, "num_classes": data.num_classes})
    module.initial_weights.load(module.model, module.name)
    device = _trainer(held, []).strategy.root_device
    seen = extract(module.model, data.source.train, data, device, evenly(len(data.source.train), SAMPLE), pixels=True)
    asked = np.arange(len(seen.kept)) % 5 == 4
    scores = []
    for rows in (seen.features, seen.pixels[..., ::2, ::2].reshape(len(asked), -1)):
        answers, _ = probes.regression(rows[~asked], rows[asked], seen.labels[~asked], data.num_classes)
        scores.append(100 * float((answers == seen.labels[asked]).mean()))
    return scores[0], scores[1]


def time_step(held: dict[str, Any], size: int) -> float:
    """Seconds to train the network of the settings on an image of `size` pixels, without the optimizer."""
    trainer = _trainer(held, [])
    own = {field.name for field in fields(NetworkSettings)}
    given = {name: value for name, value in arguments_of(held, "model").items() if name in own}
    network = NetworkSettings(**given | {"img_size": size, "num_classes": 2}).build()
    device = trainer.strategy.root_device
    network.to(device).train()
    for count in TRIES:
        images = torch.zeros(count, flatten(held).get("model.fields.in_chans", 3), size, size, device=device)
        begin = time.monotonic()
        with trainer.precision_plugin.forward_context():
            loss = network(images).float().sum()
        loss.backward()
        loss.item()  # waits for a GPU
        if (seconds := time.monotonic() - begin) > 1:
            break
    return seconds / count


def time_run(held: dict[str, Any], folder: Survey) -> Pace:
    """The pace of the run. If copies are kept, the first epoch makes them, and the others are timed."""
    held = {name: value for name, value in held.items() if name not in WEIGHTS}
    devices = devices_of(held)
    batch = max(2, held["data.batch_size"] // devices // 2 * 2)
    channels = flatten(held).get("model.fields.in_chans", 3)
    own_batches: dict[str, Any] = dict(batch_size=batch, global_batch=False, in_chans=channels)
    data = ImageNetDataModule(**arguments_of(held, "data") | own_batches)
    of_images: dict[str, Any] = dict(img_size=data.img_size, num_classes=data.num_classes, task=data.task)
    of_images |= dict(mean=data.preprocessing.mean, std=data.preprocessing.std)
    module = CaiTModule(**arguments_of(held, "model") | of_images)
    copies = min(8, max(1, folder.images // batch)) if held.get("data.copies_dir") else 0
    watch = Stopwatch(copies or WARM_UP)
    _trainer(held, [watch, *_step_callbacks(held, data)], overfit_batches=copies).fit(module, datamodule=data)
    image = watch.seconds / watch.steps / batch / devices
    copying = max(0.0, watch.first / (copies * batch) - image) * (folder.images + folder.val) if copies else 0.0
    aside = 1.25 * since_command()  # what comes after the trial, beside the epochs, takes a quarter as long
    return Pace(image, _validation(held, module, data), copying, aside)


def devices_of(settings: Mapping[str, Any]) -> int:
    """The devices that the settings name; 1 if they leave it to Lightning."""
    devices = settings.get("trainer.devices")
    return devices if isinstance(devices, int) and devices > 0 else 1


def _trainer(held: dict[str, Any], callbacks: list[Callback], **limits: Any) -> Trainer:
    """A quiet Trainer of one device, also in a process that torchrun has started."""
    chosen = {name: held[f"trainer.{name}"] for name in ("accelerator", "precision") if f"trainer.{name}" in held}
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= dict(enable_model_summary=False, num_sanity_val_steps=0, max_steps=100_000, limit_val_batches=0)
    alone: dict[str, Any] = dict(devices=1, use_distributed_sampler=False, plugins=[LightningEnvironment()])
    return Trainer(callbacks=callbacks, **quiet | alone | chosen | limits)


def _step_callbacks(held: dict[str, Any], data: Any) -> list[Callback]:
    average = [EMA(held["ema.decay"])] if held.get("ema.decay") else []
    added = [callback for make in plugins.of_kind("step_callbacks") for callback in make(data)]
    return [*average, StepSeed(0), *added]


def _validation(held: dict[str, Any], module: Any, data: Any) -> float:
    """Seconds of a validation, from a part of it; only the first starts the loader's workers."""
    data.setup("validate")
    whole = len(data.val_dataloader())
    part = min(whole, max(3, 2 * (data.num_workers or 2)))
    times = [time.monotonic()]
    watch = LambdaCallback(on_validation_batch_end=lambda *_, **__: times.append(time.monotonic()))
    _trainer(held, [watch, *_step_callbacks(held, data)], limit_val_batches=part).validate(module, data, verbose=False)
    return (times[-1] - times[1]) * whole / (part - 1) if part > 1 else times[-1] - times[0]


def since_command() -> float:
    """Seconds since this process started; where /proc does not say, those of a usual start."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 10.0
