"""A few steps of a chosen run, to measure its pace on this machine, now: its own network, batches and loader."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment

from cait import plugins
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras import recipe as extra
from cait.model.network import NetworkSettings
from cait.settings import flatten
from cait.train.callbacks import EMA, StepSeed
from cait.train.module import CaiTModule

Measured = TypeVar("Measured")
Settings = Mapping[str, Any]
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


class Trial:
    """Measures what a recipe has chosen so far, on this machine, now. With several devices, one does its part."""

    def begun(self) -> float:
        """Seconds since the command."""
        return time.monotonic() - extra.BEGUN

    def step(self, held: Settings, size: int) -> float | None:
        """Seconds to train the network on an image of `size` pixels; None if it does not take such images."""
        return quietly(lambda: time_step(held, size))

    def run(self, held: Settings) -> Pace | None:
        """The pace of the run; None if it cannot run, which the run then reports."""
        return quietly(lambda: Pace(time_run(held), 1.25 * self.begun()))  # its end takes a quarter of its start

    def domain(self, held: Settings) -> tuple[float, float] | None:
        """Top-1 of logistic regressions on the features of the weights and on the pixels; None if there are none.

        Raises UserError if the weights are of another network.
        """
        loaded = quietly(lambda: modules(held, img_size=PROBED))
        if loaded is None:
            return None
        data, module = loaded
        try:
            with warnings.catch_warnings(action="ignore"):
                module.initial_weights.load(module.model, module.name)
        except UserError as error:
            raise UserError(f"{error}; --model.name says which network to train, here {module.name}") from error
        return quietly(lambda: compare(data, module, trainer_of(held).strategy.root_device))


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


def time_step(held: Settings, size: int) -> float:
    """Seconds to train the network of the settings on an image of `size` pixels, without the optimizer."""
    trainer, names = trainer_of(held), {field.name for field in fields(NetworkSettings)}
    given = {name: value for name, value in arguments_of(held, "model").items() if name in names}
    network = NetworkSettings(**given | {"img_size": size, "num_classes": 2}).build()
    device = trainer.strategy.root_device
    network.to(device).train()
    for count in TRIES:
        images = torch.zeros(count, channels_of(held), size, size, device=device)
        begin = time.monotonic()
        with trainer.precision_plugin.forward_context():
            loss = network(images).float().sum()
        loss.backward()
        loss.item()  # waits for a GPU
        if (seconds := time.monotonic() - begin) > 1:
            break
    return seconds / count


def time_run(held: Settings) -> float:
    """Seconds to train on an image, with all that a step of the run needs."""
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
        trainer.should_stop = measured >= SECONDS or (measured > 0 and times[-1] - times[0] > LIMIT)

    trainer_of(held, LambdaCallback(on_train_batch_end=stamp), data).fit(module, datamodule=data)
    steps = len(times) - 1 - WARM_UP
    return (times[-1] - times[WARM_UP]) / steps / batch / devices


def compare(data: ImageNetDataModule, module: CaiTModule, device: torch.device) -> tuple[float, float]:
    """Top-1, in per cent, of logistic regressions on a network's features and on the pixels.

    Both learn from a sample of the training images, and answer a fifth of it.
    """
    from cait.extras.extract import evenly, extract
    from cait.extras.regression import classify

    samples = data.source.train
    seen = extract(module.model, samples, data, device, evenly(len(samples), SAMPLE), pixels=True)
    asked = np.arange(len(seen.kept)) % 5 == 4
    scores = []
    for rows in (seen.features, seen.pixels[..., ::2, ::2].reshape(len(asked), -1)):
        answers = classify(rows[~asked], seen.labels[~asked], rows[asked], data.num_classes)
        scores.append(100 * float((answers == seen.labels[asked]).mean()))
    return scores[0], scores[1]


def modules(held: Settings, **of_data: Any) -> tuple[ImageNetDataModule, CaiTModule]:
    """The run's data module, with some settings of its own, and its LightningModule."""
    data = ImageNetDataModule(**arguments_of(held, "data") | {"in_chans": channels_of(held)} | of_data)
    data.setup("validate")
    of_images: dict[str, Any] = dict(img_size=data.img_size, num_classes=data.num_classes, task=data.task)
    of_images |= dict(mean=data.preprocessing.mean, std=data.preprocessing.std)
    return data, CaiTModule(**arguments_of(held, "model") | of_images)


def arguments_of(settings: Settings, room: str) -> dict[str, Any]:
    """The settings of "model" or "data" as arguments of its class, those of `model.fields.depth` in a dictionary."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        of, _, path = name.partition(".")
        key, _, inner = path.partition(".")
        if of == room:
            found[key] = (found.get(key) or {}) | {inner: value} if inner else value
    return found


def channels_of(held: Settings) -> int:
    return flatten(dict(held)).get("model.fields.in_chans", 3)


def devices_of(held: Settings) -> int:
    """The devices that the settings name; 1 if they leave it to Lightning."""
    devices = held.get("trainer.devices")
    return devices if isinstance(devices, int) and devices > 0 else 1


def trainer_of(held: Settings, watch: Callback | None = None, data: Any = None, **limits: Any) -> Trainer:
    """A quiet Trainer of one device, also in a process that torchrun has started."""
    chosen = {name: held[f"trainer.{name}"] for name in ("accelerator", "precision") if f"trainer.{name}" in held}
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= dict(enable_model_summary=False, num_sanity_val_steps=0, max_steps=100_000, limit_val_batches=0)
    alone: dict[str, Any] = dict(devices=1, use_distributed_sampler=False, plugins=[LightningEnvironment()])
    callbacks: list[Callback] = [EMA(held["ema.decay"])] if held.get("ema.decay") else []
    if watch is not None:
        added = [callback for make in plugins.of_kind("step_callbacks") for callback in make(data)]
        callbacks = [watch, *callbacks, StepSeed(0), *added]
    return Trainer(callbacks=callbacks, **quiet | alone | chosen | limits)
