"""A run as a plan: made from its settings without any effect, printed by `--print_plan`, then applied by `fit`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import nn

from cait import __version__, ckpt, disk, plugins, signature
from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard, UnreadableReport
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint, DurableCheckpointIO, LastCheckpoint
from cait.run.loggers import run_loggers
from cait.settings import Settings, listed
from cait.train.callbacks import StepSeed
from cait.train.metrics import known_mode, metric_of_best


class SaveConfig(Callback):
    """Write config.yaml, signed, when training begins: a command that is refused earlier leaves the file alone."""

    def __init__(self, text: str, folder: Path) -> None:
        self.text = text
        self.guard = rundir.FolderGuard(folder)
        lost = re.search(".*Unable to serialize instance.*", text)
        if lost:  # a resumed run could not read it back
            raise UserError(
                f"config.yaml cannot hold {lost[0].strip()}: take text or a number instead"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a kill may come before the first step, while the head is solved
        if trainer.ckpt_path is None:
            self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.guard.check()
            text = f"# cait=={__version__}, format {ckpt.FORMAT}\n{self.text}"
            with disk.atomic_write(self.guard.folder / rundir.CONFIG) as beside:
                beside.write_text(signature.signed(text), encoding="utf-8")


class SyncBatchNorms(TorchSyncBatchNorm):
    """Share the statistics of BatchNorm, also in timm's networks: in theirs Lightning's would drop the activations."""

    def apply(self, model: nn.Module) -> nn.Module:
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return model  # in evaluation it computes as before


Planned = list[tuple[Callback, str]]
"""Callbacks in the order of their hooks, each with the reason for its place."""


@dataclass(frozen=True)
class RunPlan:
    """A run that is about to train. Nothing of it has happened."""

    run: plugins.Run
    best_mode: str
    """Which value of `run.config.best_metric` is best, "max" or "min"."""
    trainer: Settings
    """Arguments of the Trainer that win over its settings."""
    callbacks: Planned

    def __str__(self) -> str:
        """As `--print_plan` prints it."""
        loggers = ", ".join(type(logger).__name__ for logger in self.trainer.get("logger", []))
        best = {"max": "largest", "min": "smallest"}[self.best_mode]
        text = (
            f"folder     {self.run.folder}\n"
            f"start      {self.run.start or 'a new run'}\n"
            f"best.ckpt  by the {best} {self.run.config.best_metric}\n"
            f"loggers    {loggers or 'none'}, every {self.trainer['log_every_n_steps'] or 50} steps\n"
            "callbacks, in the order of their hooks:"
        )
        for callback, reason in self.callbacks:
            text += f"\n  {type(callback).__name__:20} {reason}"
        return text


def plan_run(run: plugins.Run, text: str, trainer_plugins: list[Any]) -> RunPlan:
    """The plan of a run, from what its extras see of it.

    Args:
        text: of its config.yaml.
        trainer_plugins: those of the Trainer that its settings and the machine ask for.

    Raises:
        UserError: a setting that cannot be used.
    """
    settings = run.trainer
    best_mode = run.config.best_mode or known_mode(
        run.config.best_metric, run.module.val_metrics.own
    )
    saves = settings.enable_checkpointing is not False and not settings.fast_dev_run
    if saves:
        trainer_plugins = [*trainer_plugins, DurableCheckpointIO(run.folder)]
    log_every = settings.log_every_n_steps
    if settings.max_steps > 0:  # a trial of a few steps logs metrics too
        log_every = min(log_every or 50, settings.max_steps)
    trainer: Settings = {
        "default_root_dir": run.folder,
        "plugins": trainer_plugins,
        "log_every_n_steps": log_every,
    }
    if settings.logger is not False:
        loggers = [] if settings.logger is True else listed(settings.logger)
        trainer["logger"] = run_loggers(run.folder, run.first_step) + loggers
    return RunPlan(run, best_mode, trainer, _callbacks(run, text, best_mode, saves))


def _callbacks(run: plugins.Run, text: str, best_mode: str, saves: bool) -> Planned:
    """The callbacks of a run. Lightning adds a bar, and the EMA of `--ema` at the end."""
    config = run.config
    folder = run.folder / rundir.CHECKPOINTS
    first: list[Callback] = []
    last: list[Callback] = []
    if saves:
        first = [LastCheckpoint(folder, config.save_every_n_steps, config.save_every_n_minutes)]
        last = [BestCheckpoint(folder, config.best_metric, best_mode)]
    by_reason: dict[str, list[Callback]] = {
        "first: when a batch begins, it saves what all did at the end of the one before": first,
        "before all that may draw random numbers in a step": [StepSeed(run.data.seed)],
        "--trainer.callbacks": listed(run.trainer.callbacks),
        "before extras write to the run's folder": []
        if run.trainer.fast_dev_run
        else [SaveConfig(text, run.folder)],
        "an extra: how a step is computed": plugins.step_callbacks(run.module, run.data),
        "an extra": [callback for make in plugins.of_kind("callbacks") for callback in make(run)],
        "after extras that change gradients: it takes their norm": [
            NonFiniteGuard(run.folder, config.max_nonfinite_steps)
        ],
        "counts at the end of an epoch": [UnreadableReport(run.data)],
        "last: all metrics are there, and all states are those after the validation": last,
    }
    return [(callback, reason) for reason, callbacks in by_reason.items() for callback in callbacks]


def resolve_config(config: Any, module: Any) -> Any:
    """The configuration as the run keeps it. It does not say where the run was resumed from."""
    kept = config.clone()
    kept.ckpt_path = None
    kept.best_metric = metric_of_best(
        config.best_metric, module.task.metric, config.ema.decay is not None
    )
    return kept
