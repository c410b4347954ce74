"""Train the steps of a replay again, compare them with metrics.csv, and write what they saw and did."""

import contextlib
import logging
import os
import sys
from argparse import Namespace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.table import Table

from cait import disk, plugins
from cait.cli.lightning import CaiTCLI
from cait.errors import UserError, console
from cait.extras import curves
from cait.guards.nonfinite import NonFiniteGuard, UnreadableReport
from cait.settings import Settings, listed
from cait.train.callbacks import StepSeed
from contrib.replay import contact_sheet
from contrib.replay.step_record import KeptPlan, KeptRows, StepRecord
from contrib.replay.training_batches import TrainingBatches

NEVER = 2**31
"""Skipped steps in a row that would end the replay."""


class ReplayCLI(CaiTCLI):
    """`fit` as the run did it, from a checkpoint to some steps. It writes nothing but what it shows of them.

    Validation, checkpoints and loggers are left out: none of them changes a step.

    Args:
        asked: the options of `cait replay`; `folder` is the run's, None for a configuration alone, `start` the
            checkpoint to begin from, `ckpt_path` the file to read it from, `data_state` what the run's checkpoints
            say of its data, and `planned` when its epochs were planned anew.
    """

    def __init__(self, asked: Namespace, *arguments: Any) -> None:
        self.asked = asked
        self.steps = range(asked.step, asked.step + asked.count)
        super().__init__(*arguments)

    def parse_arguments(self, *arguments: Any) -> None:
        super().parse_arguments(*arguments)
        self.config.fit.ckpt_path = (
            None if self.asked.ckpt_path is None else str(self.asked.ckpt_path)
        )

    def _meet(self) -> None:
        """Nothing to agree on: each process finds the same checkpoint."""

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        if self.asked.data_only:
            self.parser.add_instantiator(
                lambda *_, **__: LightningModule(),
                self._model_class,
                subclasses=self.subclass_mode_model,
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        asked = self.asked
        configured = self.config_init.fit.trainer
        self.save_config_callback = None
        kwargs |= dict(
            default_root_dir=asked.output,
            enable_checkpointing=False,
            enable_model_summary=False,
            profiler=None,
            max_time=None,
            min_epochs=None,
            min_steps=None,
        )
        if asked.planned:
            kwargs["max_epochs"] = asked.planned["epochs"]
        start = self.checkpoint_step or 0
        self.record = StepRecord(start, self.steps)
        if asked.data_only:
            return self._any_trainer(kwargs | dict(logger=False, enable_progress_bar=False))
        if asked.ckpt_path is not None:
            self.model.starts_anew = False  # the weights that the run began with may be gone
        if start > asked.step:
            raise UserError(f"{asked.start} is of step {start:,}, after step {asked.step:,}")
        self.kept = KeptRows()
        callbacks = [
            StepSeed(self.datamodule.seed),
            *(
                callback
                for callback in listed(configured.callbacks)
                if not isinstance(callback, Checkpoint | EarlyStopping)
            ),
            self.record,
            # skips what comes after it in a step without a finite gradient
            NonFiniteGuard(asked.output, NEVER),
            UnreadableReport(self.datamodule),
            *plugins.step_callbacks(self.model, self.datamodule),
        ]
        if asked.planned:
            callbacks.append(KeptPlan(**asked.planned))
        cluster = self.processes.cluster()
        if isinstance(cluster, SLURMEnvironment):
            kwargs["plugins"] = [*listed(configured.plugins), cluster]
        return super(CaiTCLI, self).instantiate_trainer(
            **kwargs,
            logger=[self.kept],
            callbacks=callbacks,
            log_every_n_steps=1,
            limit_val_batches=0,
            enable_progress_bar=sys.stdout.isatty(),
        )

    def _any_trainer(self, kwargs: Settings) -> Trainer:
        """A Trainer that need not train: on the CPU if the run's accelerator is missing here."""
        configured = self.config_init.fit.trainer
        # What says how many batches a step has.
        callbacks = [
            callback
            for callback in listed(configured.callbacks)
            if hasattr(callback, "get_accumulate_grad_batches")
        ]
        try:
            return super(CaiTCLI, self).instantiate_trainer(**kwargs, callbacks=[*callbacks])
        except MisconfigurationException as error:
            rank_zero_info(
                f"read on the CPU, where erased boxes have other noise than on the run's devices: {error}"
            )
            devices = configured.devices
            if isinstance(devices, list):
                devices = len(devices)
            count = int(devices) if str(devices).isdigit() else 1
            return super(CaiTCLI, self).instantiate_trainer(
                **kwargs, accelerator="cpu", devices=count, callbacks=callbacks
            )

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Go through the steps, in the place of training."""
        trains = not self.asked.data_only
        trainer = self.trainer
        if trains and trainer.num_nodes > 1 and self.processes.cluster() is None:
            raise UserError(
                f"the run is of {trainer.num_nodes} nodes: start replay on all of them as the run was started, "
                "with torchrun or srun; --data-only needs one process"
            )
        batches = TrainingBatches(self.datamodule, trainer, self.asked.data_state)
        batches.check(self.steps)
        if trains:
            self._train(*args, **kwargs)
        if trainer.is_global_zero:
            self._show(batches)

    def _train(self, *args: Any, **kwargs: Any) -> None:
        asked = self.asked
        if self.processes.rank() == 0:
            origin = (
                f"from {asked.start}"
                if asked.start
                else "no checkpoint lies before it, so from the first step"
            )
            steps = f"{self.record.start:,} to {self.steps[-1]:,}"
            print(f"step {asked.step:,}: {origin}: steps {steps} are trained again", flush=True)
        self.datamodule.trainer = None
        logging.disable(logging.INFO)  # Lightning names the copy of the checkpoint
        try:
            self.trainer.fit(*args, **kwargs)
        finally:
            logging.disable(logging.NOTSET)
        if self.trainer.is_global_zero:
            self._show_metrics()

    def _show_metrics(self) -> None:
        """Compare what the steps gave with metrics.csv."""
        logged = {}
        with contextlib.suppress(UserError):  # nothing is logged yet
            logged = curves.rows(self.asked.folder)
        table = Table("step", "", "replay", "metrics.csv")
        for step in self.steps:
            for name, value in self.kept.rows[step].items():
                if name.startswith("train/") or name == "lr":
                    again = str(value)
                    before = str(logged.get(step, {}).get(name, "not logged"))
                    table.add_row(str(step), name, again, "same" if before == again else before)
            table.add_section()
        console().print(table)

    def _show(self, batches: TrainingBatches) -> None:
        """Draw and list the images of the steps, and print the names of the files."""
        asked = self.asked
        written = []
        for step in self.steps:
            stem = asked.output / f"step-{step:06d}"
            positions = batches.of_step(step) if asked.data_only else self.record.batches[step]
            shards = [
                (*position, process)
                for position in positions
                for process in range(self.trainer.world_size)
            ]
            read = ((batches.read(*shard), self._losses(*shard)) for shard in shards)
            written += contact_sheet.write(
                stem, step, read, len(shards) > 1, asked.images, self.datamodule.settings
            )
            if not asked.data_only:
                path = stem.with_name(f"{stem.name}-gradients.csv")
                written.append(path)
                norms = self.record.gradients[step].items()
                disk.write_csv(path, ("layer", "norm"), norms)
                if asked.count == 1:
                    table = Table("layer", "norm of the gradient")
                    for layer, norm in norms:
                        table.add_row(layer, f"{norm:.6g}")
                    console().print(table)
        for path in written:
            print(os.path.relpath(path))

    def _losses(self, epoch: int, batch: int, process: int) -> list[float] | None:
        """The loss of each image of a batch, if it was noted."""
        losses = self.record.losses.get((epoch, batch))
        return None if losses is None else losses[process].tolist()
