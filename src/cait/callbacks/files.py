"""metrics.csv and TensorBoard in the run's own folder, going on where a checkpoint stood."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment

METRICS_FILE = "metrics.csv"


def run_argument(run_dir: Path) -> str:
    """What `make resume RUN=` and `make eval RUN=` take for this folder."""
    return run_dir.name if run_dir.parent == Path("logs") else str(run_dir)


class RunCSVLogger(CSVLogger):
    """Writes `<run>/metrics.csv`, and keeps of an earlier part of the run the rows before `first_step`.

    Lightning's logger deletes the file of a folder that it finds in use.
    """

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        # Every row goes to the disk when it is logged: a run that is killed keeps its figures.
        super().__init__(run_dir.parent, name=run_dir.name, version="", flush_logs_every_n_steps=1)
        self.first_step = first_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is not None:
            return self._experiment
        path = Path(self.log_dir) / METRICS_FILE
        rows: list[dict[str, Any]] = []
        if self.first_step and path.is_file():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) < self.first_step]
        writer = super().experiment  # deletes the file
        writer.metrics = [{key: value for key, value in row.items() if value != ""} for row in rows]
        writer.save()
        return writer


def run_loggers(run_dir: Path, first_step: int) -> list[Logger]:
    """The loggers of a run; rows and events from `first_step` on are dropped, for they will come again."""
    tensorboard = TensorBoardLogger(
        run_dir.parent, name=run_dir.name, version="", default_hp_metric=False, purge_step=first_step
    )
    return [RunCSVLogger(run_dir, first_step), tensorboard]


def run_checkpoints(run_dir: Path) -> list[ModelCheckpoint]:
    """`last.ckpt` after every epoch and `best.ckpt` by validation accuracy."""
    common: dict[str, Any] = dict(
        dirpath=run_dir / "checkpoints", enable_version_counter=False, auto_insert_metric_name=False
    )
    best = ModelCheckpoint(filename="best", monitor="val/acc1", mode="max", **common)
    last = ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **common)
    return [best, last]
