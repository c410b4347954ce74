"""Checks of the Trainer's settings, before it is made and afterwards."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from cait.errors import UserError
from cait.train.optim import ScheduleSettings


def check_numbers(given: Any) -> None:
    """Refuse settings of the Trainer that Lightning silently accepts or fails on later.

    Args:
        given: the Trainer's settings, as the command line has them.

    Raises:
        UserError: it names the setting and its value.
    """
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if given[name] == 0:
            raise UserError(f"--trainer.{name} 0 trains nothing")
    if given.accumulate_grad_batches is not None and given.accumulate_grad_batches < 1:
        raise UserError(f"--trainer.accumulate_grad_batches must be at least 1, got {given.accumulate_grad_batches}")
    interval = given.val_check_interval
    if isinstance(interval, int | float) and interval <= 0:
        raise UserError(f"--trainer.val_check_interval must be above 0, got {interval}")
    if not isinstance(interval, int | float | None):  # each process would go by its own clock, and a resumed run too
        raise UserError(f"--trainer.val_check_interval counts batches or a share of an epoch, not time: {interval}")
    if given.use_distributed_sampler:
        raise UserError("--trainer.use_distributed_sampler true: the data module itself divides the images")


REPLACED = {
    "BaseFinetuning": "the optimizer's groups stay as they are in a run; take --model.freeze",
    "BatchSizeFinder": "find the batch before the run (docs/your_script.md), and give it as --data.batch_size",
    "LearningRateFinder": "find the rate before the run (docs/your_script.md), and give it as --model.lr",
    "ModelPruning": "a run cannot be resumed with it; prune the network that has been trained",
    "SpikeDetection": "a run cannot be resumed with it; --max_nonfinite_steps ends a run without finite gradients",
    "StochasticWeightAveraging": "no checkpoint would hold its average; take --ema.decay",
    "Timer": "take --trainer.max_time",
    "WeightAveraging": "checkpoints would hold its average in place of the weights; take --ema.decay",
}
"""Callbacks of Lightning that do not fit a run which saves, stops and resumes at any step, and what to do instead."""


def check_callbacks(given: Any) -> None:
    """Refuse the callbacks of `REPLACED` and their subclasses, as configurations name them, before they are made."""
    named = given if isinstance(given, list) else [given]
    for path in (callback.class_path for callback in named if hasattr(callback, "class_path")):
        module, _, name = path.rpartition(".")
        for base in getattr(getattr(sys.modules.get(module), name, None), "__mro__", ()):  # it may be a function
            if base.__module__.startswith("lightning.") and base.__name__ in REPLACED:
                raise UserError(f"--trainer.callbacks {name}: {REPLACED[base.__name__]}")


def check_rates(schedule: ScheduleSettings, images: int) -> None:
    """Refuse a least learning rate above the highest one, for steps of so many images."""
    peak = max(schedule.lr, schedule.lr * images / (schedule.lr_base_size or images))
    if schedule.schedule != "constant" and schedule.min_lr > peak:
        raise UserError(f"--model.min_lr {schedule.min_lr:g} is above --model.lr {schedule.lr:g}; lower it")


def check_strategy(given: str | Strategy) -> None:
    """Refuse a strategy that nobody has, or with which a run cannot save and resume."""
    if isinstance(given, Strategy):
        _check_type(type(given))
    elif "." not in given and (not given.startswith(("auto", "ddp")) or "spawn" in given):
        raise UserError(f"--trainer.strategy {given}: a run takes auto, ddp, ddp_... or a class_path")


def _check_type(kind: type) -> None:
    if kind not in (SingleDeviceStrategy, DDPStrategy) and not hasattr(kind, "check"):
        raise UserError(f"--trainer.strategy: runs save and resume with ddp or one device, not {kind.__name__}")


def check_trainer(trainer: Trainer, trains: bool, sync_batchnorm: bool) -> None:
    """Refuse what the strategy cannot do, by its method `check` if it has one, and processes that are missing."""
    _check_type(type(trainer.strategy))
    if hasattr(trainer.strategy, "check"):
        trainer.strategy.check(trainer.precision, sync_batchnorm)
    if not trains:
        return
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(cluster, LightningEnvironment) and not os.getenv("MASTER_ADDR"):
        raise UserError(f"--trainer.num_nodes {trainer.num_nodes}: start it on every machine with torchrun or srun")
    asked = trainer.num_devices * trainer.num_nodes
    if trainer.world_size != asked:  # Lightning would train on as many as SLURM has started
        raise UserError(
            f"--trainer.devices and num_nodes make {asked} processes, SLURM has started {trainer.world_size}"
        )
