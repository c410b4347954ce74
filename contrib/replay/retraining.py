"""Train the steps of a replay again, compare them with metrics.csv, and write what they saw and did."""

import contextlib
import logging
import os
import sys
from argparse import Namespace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.table import Table

from cait import disk, plugins
from cait.cli.lightning import CaiTCLI
from cait.cli.run_plan import listed
from cait.errors import UserError, console
from cait.extras import curves
from cait.guards.nonfinite import NonFiniteGuard, UnreadableReport
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
        self.config.fit.ckpt_path = None if self.asked.ckpt_path is None else str(self.asked.ckpt_path)

    def _meet(self) -> None:
        """Nothing to agree on: each process finds the same checkpoint."""

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        if self.asked.data_only:
            self.parser.add_instantiator(_no_network, self._model_class, subclasses=self.subclass_mode_model)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init.fit.trainer
        self.save_config_callback = None
        kwargs |= dict(default_root_dir=self.asked.output, enable_checkpointing=False, enable_progress_bar=False)
        kwargs |= dict(enable_model_summary=False, profiler=None, max_time=None, min_epochs=None, min_steps=None)
        if self.asked.planned:
            kwargs["max_epochs"] = self.asked.planned["epochs"]
        if self.asked.data_only:
            return self._any_trainer(kwargs | dict(logger=False))
        if self.asked.ckpt_path is not None:
            self.model.starts_anew = False  # the weights that the run began with may be gone
        start = self.checkpoint_step or 0
        if start > self.asked.step:
            raise UserError(f"{self.asked.start} is of step {start:,}, after step {self.asked.step:,}")
        self.kept, self.record = KeptRows(), StepRecord(start, self.steps)
        # The guard skips what comes after it in a step without a finite gradient.
        guard = NonFiniteGuard(self.asked.output, NEVER)
        callbacks: list[Callback] = [StepSeed(self.datamodule.seed), self.record, guard]
        callbacks.append(UnreadableReport(self.datamodule))
        callbacks += plugins.step_callbacks(self.model, self.datamodule)
        if self.asked.planned:
            callbacks.append(KeptPlan(**self.asked.planned))
        if sys.stdout.isatty():
            kwargs["enable_progress_bar"] = True
        named = [each for each in listed(given.callbacks) if not isinstance(each, Checkpoint | EarlyStopping)]
        kwargs |= dict(logger=[self.kept], callbacks=[*named, *callbacks], log_every_n_steps=1, limit_val_batches=0)
        if isinstance(cluster := self.processes.cluster(), SLURMEnvironment):
            kwargs["plugins"] = [*listed(given.plugins), cluster]
        return super(CaiTCLI, self).instantiate_trainer(**kwargs)

    def _any_trainer(self, kwargs: dict[str, Any]) -> Trainer:
        """A Trainer that need not train: on the CPU if the run's accelerator is missing here."""
        named = listed(self.config_init.fit.trainer.callbacks)
        kept = [each for each in named if hasattr(each, "get_accumulate_grad_batches")]  # which says what a step is
        try:
            return super(CaiTCLI, self).instantiate_trainer(**kwargs, callbacks=[*kept])
        except MisconfigurationException as error:
            devices = self.config_init.fit.trainer.devices
            count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
            rank_zero_info(f"read on the CPU, where erased boxes have other noise than on the run's devices: {error}")
            how = kwargs | dict(accelerator="cpu", devices=count, callbacks=kept)
            return super(CaiTCLI, self).instantiate_trainer(**how)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Go through the steps, in the place of training."""
        asked, trainer = self.asked, self.trainer
        if not asked.data_only and trainer.num_nodes > 1 and self.processes.cluster() is None:
            remedy = "start replay on all of them as the run was started, with torchrun or srun"
            raise UserError(f"the run is of {trainer.num_nodes} nodes: {remedy}; --data-only needs one process")
        batches = TrainingBatches(self.datamodule, trainer, asked.data_state)
        batches.check(self.steps)
        if not asked.data_only:
            self._train(*args, **kwargs)
        if trainer.is_global_zero:
            self._show(batches)

    def _train(self, *args: Any, **kwargs: Any) -> None:
        asked = self.asked
        if "LOCAL_RANK" not in os.environ:
            origin = f"from {asked.start}" if asked.start else "no checkpoint lies before it, so from the first step"
            again = f"steps {self.record.start:,} to {self.steps[-1]:,} are trained again"
            print(f"step {asked.step:,}: {origin}: {again}", flush=True)
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
        logged: dict[int, dict[str, float]] = {}
        with contextlib.suppress(UserError):  # nothing is logged yet
            logged = curves.rows(self.asked.folder)
        table = Table("step", "", "replay", "metrics.csv")
        for step in self.steps:
            for name, value in self.kept.rows[step].items():
                if name.startswith("train/") or name == "lr":
                    before = logged.get(step, {}).get(name)
                    found = "same" if str(before) == str(value) else "not logged" if before is None else str(before)
                    table.add_row(str(step), name, str(value), found)
            table.add_section()
        console().print(table)

    def _show(self, batches: TrainingBatches) -> None:
        """Draw and list the images of the steps, and print the names of the files."""
        asked, written = self.asked, []
        for step in self.steps:
            stem = asked.output / f"step-{step:06d}"
            places = batches.of_step(step) if asked.data_only else self.record.batches[step]
            all_places = [(*place, process) for place in places for process in range(self.trainer.world_size)]
            read = ((batches.read(*place), self._losses(*place)) for place in all_places)
            several, preprocessing = len(all_places) > 1, self.datamodule.settings
            written += contact_sheet.write(stem, step, read, several, asked.images, preprocessing)
            if not asked.data_only:
                written.append(stem.with_name(f"{stem.name}-gradients.csv"))
                norms = list(self.record.gradients[step].items())
                disk.write_csv(written[-1], ("layer", "norm"), norms)
                if asked.count == 1:
                    table = Table("layer", "norm of the gradient")
                    for layer, norm in norms:
                        table.add_row(layer, f"{norm:.6g}")
                    console().print(table)
        for path in written:
            print(os.path.relpath(path))

    def _losses(self, epoch: int, batch: int, process: int) -> list[float] | None:
        """The loss of each image of a batch, if it was noted."""
        noted = None if self.asked.data_only else self.record.losses.get((epoch, batch))
        return None if noted is None else noted[process].tolist()


def _no_network(*_: Any, **__: Any) -> LightningModule:
    return LightningModule()
