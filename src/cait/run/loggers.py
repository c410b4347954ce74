"""metrics.csv and TensorBoard in the run's folder, continued from where a checkpoint stood."""

import csv
import math
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment

from cait import disk
from cait.ckpt import State
from cait.errors import UserError, tell
from cait.run.rundir import FolderGuard


class RunCSVWriter(ExperimentWriter):
    """Lightning's writer, but it keeps the file that it finds, and rewrites it whole."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.guard = FolderGuard(Path(log_dir))

    def _check_log_dir_exists(self) -> None:
        pass

    def save(self) -> None:
        self.guard.check()
        super().save()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self.replace_rows(self.rows_before(math.inf), fieldnames)

    def rows_before(self, step: float) -> list[State]:
        """The whole rows of the steps before `step`; a line says what is lost: the checkpoint is the truth."""
        path = Path(self.metrics_file_path)
        try:
            rows = disk.read_rows(path)
        except UserError as error:
            if step > 0:
                tell(f"no metrics of the steps before {step:,} are kept: {error}")
            return []
        whole = [row for row in rows if None not in row and row.get("step", "").isdecimal()]
        if len(whole) < len(rows):
            tell(f"{path}: {len(rows) - len(whole):,} lines are no rows, they are left out")
        return [row for row in whole if int(row["step"]) < step]

    def replace_rows(self, rows: list[State], fieldnames: list[str]) -> None:
        cells = ([row.get(name, "") for name in fieldnames] for row in rows)
        disk.write_csv(Path(self.metrics_file_path), fieldnames, cells)


class RunCSVLogger(CSVLogger):
    """Write `<run>/metrics.csv`; keep the rows before `first_step` that are there already."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        # Write every row when it is logged: a run that is killed keeps its metrics.
        super().__init__(run_dir.parent, name=run_dir.name, version="", flush_logs_every_n_steps=1)
        self.first_step = first_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = writer = RunCSVWriter(self.log_dir)
            rows = writer.rows_before(self.first_step)
            if rows:
                writer.metrics_keys = sorted(rows[0])
                writer.replace_rows(rows, writer.metrics_keys)
            else:
                Path(writer.metrics_file_path).unlink(missing_ok=True)
        return self._experiment


def keep_rows(writer: Any) -> None:
    """Go on with the file that is there, which Lightning's writer would delete."""
    path = Path(writer.metrics_file_path)
    if path.is_file():
        writer.metrics_keys = next(csv.reader(disk.read_text(path).splitlines()), [])


def run_loggers(run_dir: Path, first_step: int) -> list[Logger]:
    """The loggers of a run. They drop rows and events from `first_step` on, because those will come again.

    A CSVLogger of the user's own drops nothing: its file may be of other runs too.
    """
    ExperimentWriter._check_log_dir_exists = keep_rows  # type: ignore
    events = TensorBoardLogger(
        run_dir.parent, run_dir.name, version="", default_hp_metric=False, purge_step=first_step
    )
    return [RunCSVLogger(run_dir, first_step), events]
