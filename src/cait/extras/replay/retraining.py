"""Train the steps of a replay again, compare them with metrics.csv, and write what they saw and did."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

from cait import ckpt, disk, plugins
from cait.cli.lightning import CaiTCLI, _listed
from cait.errors import UserError
from cait.extras import curves
from cait.extras.replay.contact_sheet import StepImages
from cait.extras.replay.step_record import KeptRows, StepRecord
from cait.extras.replay.training_batches import TrainingBatches
from cait.guards.nonfinite import NonFiniteGuard, UnreadableReport
from cait.run import rundir
from cait.train.step_seed import StepSeed

NEVER = 2**31
"""Skipped steps in a row that would end the replay."""


class ReplayCLI(CaiTCLI):
    """`fit` as the run did it, from a checkpoint to some steps. It writes nothing but what it shows of them.

    Validation, checkpoints and loggers are left out: none of them changes a step.

    Args:
        asked: the options of `cait replay`; `folder` is the run's, None for a configuration alone, `start` the
            checkpoint to begin from and `ckpt_path` the file to read it from.
    """

    def __init__(self, asked: Namespace, *arguments: Any) -> None:
        self.asked = asked
        self.last = asked.step + asked.count - 1
        super().__init__(*arguments)

    def configuration(self, path: Path) -> dict[str, Any] | None:
        how = self.plain_configuration if self.asked.data_only else super().configuration
        return how(path)

    def parse_arguments(self, *arguments: Any) -> None:
        super().parse_arguments(*arguments)
        self.config.fit.ckpt_path = None if self.asked.ckpt_path is None else str(self.asked.ckpt_path)
        if "monitor" in plugins.merged("CALLBACK_SETTINGS"):  # it changes no step, and would write
            self.config.fit.monitor.every_n_steps = None

    def _meet(self) -> None:
        """Nothing to agree on: each process finds the same checkpoint."""

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        if self.asked.data_only:
            self.parser.add_instantiator(_no_network, self._model_class, subclasses=self.subclass_mode_model)

    def _trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init.fit.trainer
        self.save_config_callback = None
        kwargs |= dict(default_root_dir=self.asked.output, enable_checkpointing=False, enable_progress_bar=False)
        kwargs |= dict(enable_model_summary=False, profiler=None, max_time=None, min_epochs=None, min_steps=None)
        if self.asked.data_only:
            return self._any_trainer(kwargs | dict(logger=False, callbacks=[]))
        start = 0 if self.asked.start is None else self.checkpoint_step
        if start > self.asked.step:
            raise UserError(f"{self.asked.start} is of step {start:,}, after step {self.asked.step:,}")
        self.kept, self.record = KeptRows(), StepRecord(start, self.asked.step, self.last)
        # The guard skips what comes after it in a step without a finite gradient.
        guard = NonFiniteGuard(self.asked.output, NEVER)
        callbacks: list[Callback] = [StepSeed(self.datamodule.seed), self.record, guard]
        callbacks.append(UnreadableReport(self.datamodule))
        callbacks += [callback for make in plugins.of_kind("step_callbacks") for callback in make(self.datamodule)]
        if sys.stdout.isatty():
            callbacks += [make() for make in plugins.of_kind("progress_bar")]
            kwargs["enable_progress_bar"] = True
        named = [each for each in _listed(given.callbacks) if not isinstance(each, Checkpoint | EarlyStopping)]
        kwargs |= dict(logger=[self.kept], callbacks=[*named, *callbacks], log_every_n_steps=1, limit_val_batches=0)
        if isinstance(cluster := self.processes.cluster(), SLURMEnvironment):
            kwargs["plugins"] = [*_listed(given.plugins), cluster]
        return super(CaiTCLI, self).instantiate_trainer(**kwargs)

    def _any_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """A Trainer that need not train: on the CPU if the run's accelerator is missing here."""
        try:
            return super(CaiTCLI, self).instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            devices = self.config_init.fit.trainer.devices
            count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
            trainer = super(CaiTCLI, self).instantiate_trainer(**kwargs | dict(accelerator="cpu", devices=count))
            rank_zero_info(f"read on the CPU, where erased boxes have other noise than on the run's devices: {error}")
            return trainer

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Go through the steps, in the place of training."""
        asked, trainer = self.asked, self.trainer
        if not asked.data_only and trainer.num_nodes > 1 and self.processes.cluster() is None:
            raise UserError(
                f"the run is of {trainer.num_nodes} nodes: start replay on all of them as the run was started, with "
                "torchrun or srun; --data-only needs one process"
            )
        batches = TrainingBatches(self.datamodule, trainer, _data_state(asked.folder))
        batches.check(asked.step, self.last)
        if asked.data_only:
            self._show(batches)
        else:
            self.datamodule.trainer = None
            self._announce()
            logging.disable(logging.INFO)  # Lightning names the copy of the checkpoint
            try:
                trainer.fit(*args, **kwargs)
            finally:
                logging.disable(logging.NOTSET)
            if trainer.is_global_zero:
                self._show_metrics()
                self._show(batches)

    def _announce(self) -> None:
        asked, start = self.asked, self.record.start
        if "LOCAL_RANK" not in os.environ:
            origin = f"from {asked.start}" if asked.start else "no checkpoint lies before it, so from the first step"
            print(f"step {asked.step:,}: {origin}: steps {start:,} to {self.last:,} are trained again", flush=True)

    def _show_metrics(self) -> None:
        """Compare what the steps gave with metrics.csv."""
        logged: dict[int, dict[str, str]] = {}
        with contextlib.suppress(UserError):  # nothing is logged yet
            logged = curves.rows(self.asked.folder)
        table = Table("step", "", "replay", "metrics.csv")
        for step in range(self.asked.step, self.last + 1):
            for name, value in self.kept.rows[step].items():
                if name.startswith("train/") or name == "lr":
                    before = logged.get(step, {}).get(name)
                    found = "same" if before == str(value) else before or "not logged"
                    table.add_row(str(step), name, str(value), found)
            table.add_section()
        Console().print(table)

    def _show_gradients(self, step: int, path: Path) -> None:
        norms = list(self.record.gradients[step].items())
        disk.write_csv(path, ("layer", "norm"), norms)
        if self.asked.count == 1:
            table = Table("layer", "norm of the gradient")
            for layer, norm in norms:
                table.add_row(layer, f"{norm:.6g}")
            Console().print(table)

    def _show(self, batches: TrainingBatches) -> None:
        """Draw and list the images of the steps, and print the names of the files."""
        asked, written = self.asked, []
        for step in range(asked.step, self.last + 1):
            stem = asked.output / f"step-{step:06d}"
            places = batches.of_step(step) if asked.data_only else self.record.batches[step]
            images = StepImages(step, asked.images, self.datamodule)
            for place in places:
                for process in range(self.trainer.world_size):
                    losses = None if asked.data_only else self.record.losses.get(place)
                    each = None if losses is None else losses[process].tolist()
                    images.add(batches.read(*place, process), each, len(places) * self.trainer.world_size > 1)
            written += images.write(stem)
            if not asked.data_only:
                written.append(stem.with_name(f"{stem.name}-gradients.csv"))
                self._show_gradients(step, written[-1])
        for path in written:
            print(os.path.relpath(path))


def _no_network(*_: Any, **__: Any) -> LightningModule:
    return LightningModule()


def _data_state(folder: Path | None) -> dict[str, Any] | None:
    """What a run's checkpoints say about its data; None if there is no checkpoint."""
    if folder is None:
        return None
    for name in (rundir.LAST, rundir.PREVIOUS, rundir.BEST):
        path = folder / rundir.CHECKPOINTS / name
        with contextlib.suppress(UserError):
            return ckpt.data_state(ckpt.read_checkpoint(path, without=ckpt.TENSORS))
    return None
