"""A few steps of a chosen run, to measure its pace on this machine, now: its own network, batches and loader."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment

from cait import plugins
from cait.data.datamodule import ImageNetDataModule
from cait.extras.recipe.duration import Pace
from cait.extras.recipe.rules import Recipe
from cait.extras.recipe.survey import Survey
from cait.model.network import NetworkSettings
from cait.settings import flatten
from cait.train.ema import EMA
from cait.train.module import CaiTModule
from cait.train.step_seed import StepSeed

WARM_UP, SECONDS, LIMIT = 3, 3.0, 20.0
"""Steps before the clock starts, seconds of steps that are measured, and seconds after which a slow trial ends."""
PROBED, SAMPLE = 128, 500
"""Side of the images in pixels, and how many, on which features and pixels are compared."""
TRIES = (4, 16, 16)
"""Images of the steps that are timed at a size; the last that takes less than a second counts."""
WEIGHTS = {"model.weights", "model.weights_ema", "model.pretrained"}
"""Reading them takes long, and changes no pace."""


class Stopwatch(Callback):
    """Time the steps of a trial. With `copies`, the first epoch makes them, and the others are timed."""

    def __init__(self, copies: bool) -> None:
        self.copies = copies
        self.begun = time.monotonic()
        self.first_epoch, self.steps, self.seconds = 0.0, 0, 0.0
        self._since: float | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.monotonic()
        if self._since is not None:
            self.steps, self.seconds = self.steps + 1, now - self._since
        elif not self.copies and trainer.global_step >= WARM_UP:
            self._since = now
        if self.seconds >= SECONDS or (self.steps and now - self.begun > LIMIT):
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._epoch_begun = time.monotonic()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.copies and self._since is None:
            self._since = time.monotonic()
            self.first_epoch = self._since - self._epoch_begun


class Trial:
    """Measures a recipe, see `cait.extras.recipe.rules.Measure`; the first process does so for all.

    With several devices, one of them does its part of each batch.
    """

    def __init__(self, folder: Survey, of_first: Callable[[Callable[[], str]], str] = lambda make: make()) -> None:
        self.folder, self.of_first = folder, of_first

    def step(self, recipe: Recipe, size: int) -> float | None:
        return json.loads(self.of_first(lambda: json.dumps(_quietly(lambda: time_step(recipe.held(), size)))))

    def run(self, recipe: Recipe) -> Pace | None:
        measured = json.loads(self.of_first(lambda: json.dumps(_quietly(lambda: self._run(recipe)))))
        return Pace(**measured) if measured else None

    def domain(self, recipe: Recipe) -> tuple[float, float] | None:
        """Top-1 of logistic regressions on the weights' features and on the pixels; None if they cannot be had."""
        return json.loads(self.of_first(lambda: json.dumps(_quietly(lambda: compare(recipe.held())))))

    def _run(self, recipe: Recipe) -> dict[str, Any]:
        devices = recipe.get("trainer.devices", 1)
        return asdict(_measured(recipe, self.folder, devices if isinstance(devices, int) and devices > 0 else 1))


def _quietly(measure: Callable[[], Any]) -> Any:
    """What is measured; None if it fails, which the run then reports."""
    logs = logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return measure()
    except Exception:  # of many kinds: settings of any value, networks of the user's own
        return None
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def compare(held: dict[str, Any]) -> tuple[float, float]:
    """Top-1, in per cent, of logistic regressions on a network's features and on the pixels.

    Both learn from a sample of the training images at `PROBED` pixels, and answer a fifth of it.
    """
    from cait.extras import probes
    from cait.extras.extract import evenly, extract

    data = ImageNetDataModule(**_arguments(held, "data") | {"img_size": PROBED})
    data.announces = False
    data.setup("validate")
    module = CaiTModule(**_arguments(held, "model") | {"img_size": PROBED, "num_classes": data.num_classes})
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
    given = {name: value for name, value in _arguments(held, "model").items() if name in own}
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


def _measured(recipe: Recipe, folder: Survey, devices: int) -> Pace:
    held = {name: value for name, value in recipe.held().items() if name not in WEIGHTS}
    batch = max(2, held["data.batch_size"] // devices // 2 * 2)
    channels = flatten(held).get("model.fields.in_chans", 3)
    data = ImageNetDataModule(
        **_arguments(held, "data") | dict(batch_size=batch, global_batch=False, in_chans=channels)
    )
    data.announces = False
    of_images: dict[str, Any] = dict(img_size=data.img_size, num_classes=data.num_classes)
    of_images |= dict(mean=data.preprocessing.mean, std=data.preprocessing.std)
    module = CaiTModule(**_arguments(held, "model") | of_images)
    copies = bool(held.get("data.copies_dir"))
    steps = max(1, folder.images // batch)
    watch = Stopwatch(copies)
    trainer = _trainer(held, [watch, *_step_callbacks(held, data)], overfit=min(8, steps) if copies else 0)
    trainer.fit(module, datamodule=data)
    image = watch.seconds / watch.steps / batch / devices
    copying = max(0.0, watch.first_epoch / (min(8, steps) * batch) - image) * (folder.images + folder.val)
    aside = 1.25 * since_command()  # what comes after the trial, beside the epochs, takes a quarter as long
    return Pace(image, _validation(held, module, data), copying if copies else 0.0, aside, is_measured=True)


def _arguments(held: dict[str, Any], room: str) -> dict[str, Any]:
    """The settings of "model" or "data" as arguments of its class, those of `model.fields.depth` in a dictionary."""
    found: dict[str, Any] = {}
    for name, value in held.items():
        of, _, path = name.partition(".")
        key, _, inner = path.partition(".")
        if of == room:
            found[key] = (found.get(key) or {}) | {inner: value} if inner else value
    return found


def _trainer(held: dict[str, Any], callbacks: list[Callback], overfit: int = 0, **limits: Any) -> Trainer:
    chosen = {name: held[f"trainer.{name}"] for name in ("accelerator", "precision") if f"trainer.{name}" in held}
    quiet: dict[str, Any] = dict(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    limits = dict(max_steps=100_000, limit_val_batches=0, num_sanity_val_steps=0, overfit_batches=overfit) | limits
    alone: dict[str, Any] = dict(
        devices=1, use_distributed_sampler=False, plugins=[LightningEnvironment()]
    )  # also under torchrun
    return Trainer(callbacks=callbacks, **alone, **quiet, **limits, **chosen)


def _step_callbacks(held: dict[str, Any], data: Any) -> list[Callback]:
    average = [EMA(held["ema.decay"])] if held.get("ema.decay") else []
    added = [callback for make in plugins.of_kind("step_callbacks") for callback in make(data)]
    return [*average, StepSeed(0), *added]


def _validation(held: dict[str, Any], module: Any, data: Any) -> float:
    """Seconds of a validation, from a part of it; only the first starts the loader's workers."""
    data.setup("validate")
    whole = len(data.val_dataloader())
    part = min(whole, max(3, 2 * (data.num_workers or 2)))
    ends: list[float] = []
    watch = LambdaCallback(on_validation_batch_end=lambda *_, **__: ends.append(time.monotonic()))
    begun = time.monotonic()
    _trainer(held, [watch, *_step_callbacks(held, data)], limit_val_batches=part).validate(module, data, verbose=False)
    return (ends[-1] - ends[0]) * whole / (part - 1) if part > 1 else ends[-1] - begun


def since_command() -> float:
    """Seconds since this process started; where /proc does not say, those of a usual start."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 10.0
