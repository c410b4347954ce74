"""A few steps of a chosen run, to measure its pace on this machine, now: its own network, batches and loader."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import LightningEnvironment

from cait import plugins
from cait.data.datamodule import ImageNetDataModule
from cait.extras.recipe.duration import Pace
from cait.extras.recipe.rules import Recipe
from cait.extras.recipe.survey import Survey
from cait.settings import flatten
from cait.train.ema import EMA
from cait.train.module import CaiTModule
from cait.train.step_seed import StepSeed

WARM_UP, SECONDS, LIMIT = 3, 3.0, 20.0
"""Steps before the clock starts, seconds of steps that are measured, and seconds after which a slow trial ends."""
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
            import torch

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


def measure(recipe: Recipe, folder: Survey, devices: int = 1) -> Pace | None:
    """The pace of a run with the settings of the recipe so far; None if they cannot run, which the run then reports.

    With several devices, one of them does its part of each batch.
    """
    logs = logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return _measured(recipe, folder, devices)
    except Exception:  # of many kinds: settings of any value, networks of the user's own
        return None
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


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
