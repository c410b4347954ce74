"""Lightning's loggers of W&B, MLflow and Comet; a run keeps its id there through resumes."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cait import disk
from cait.errors import UserError, one_line, to_install

PROJECT = "cait"
"""The project of all runs in a tracker, unless --logger_args says otherwise."""


class RunMLFlow(MLFlowLogger):
    """MLflow refuses a new value for a parameter, so a run that is resumed with one keeps the first."""

    @property
    def save_dir(self) -> str | None:
        return None  # Lightning needs no folder here: all goes into the database

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        if not self.experiment.get_run(self.run_id).data.params:
            super().log_hyperparams(params)


class AddLogger(Callback):
    """Add a logger to those of the Trainer."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.loggers = [*trainer.loggers, self.logger]


def tracker(name: str, settings: Mapping[str, Any], run_dir: Path, resumed: bool) -> Logger:
    """Make and start the logger of a tracker, so that its errors come before training begins.

    Args:
        name: wandb, mlflow or comet.
        settings: arguments of Lightning's logger.
        resumed: go on under the id that the run has there.

    Raises:
        UserError: its package is missing, or it cannot be reached.
    """
    if "api_key" in settings:  # config.yaml and the tracker would show it to everybody
        raise UserError(f"--logger_args.api_key would be written into the run; log in with `{name} login` instead")
    path = run_dir / f"{name}.json"
    known = disk.read_json(path, {"id": str})["id"] if resumed and path.is_file() else None
    try:
        logger, id = LOGGERS[name](run_dir, known, dict(settings))
        _ = logger.experiment
    except ModuleNotFoundError as error:
        hint = f"{to_install('comet-ml' if name == 'comet' else '[loggers]')} ({one_line(error)})"
        raise UserError(f"--logger {name} needs its package: {hint}") from error
    except Exception as error:  # whatever the tracker's client raises
        raise UserError(f"--logger {name} cannot start: {one_line(error) or type(error).__name__}") from error
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        run_dir.mkdir(parents=True, exist_ok=True)
        disk.write_json(path, {"id": id})
    return logger


def _wandb(run_dir: Path, known: str | None, settings: dict[str, Any]) -> tuple[Any, str]:
    id = known or uuid.uuid4().hex[:8]
    defaults: dict[str, Any] = {"name": run_dir.name, "project": PROJECT, "save_dir": run_dir}
    return WandbLogger(**defaults | settings, id=id), id


def _mlflow(run_dir: Path, known: str | None, settings: dict[str, Any]) -> tuple[Any, str]:
    for package in ("mlflow", "alembic"):  # else they list the tables of a new database
        logging.getLogger(package).setLevel(logging.WARNING)
    database = f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or database
    defaults: dict[str, Any] = {"experiment_name": PROJECT, "run_name": run_dir.name, "tracking_uri": uri}
    logger = RunMLFlow(**defaults | settings, run_id=known)
    return logger, str(logger.run_id)


def _comet(run_dir: Path, known: str | None, settings: dict[str, Any]) -> tuple[Any, str]:
    key = known or uuid.uuid4().hex
    defaults: dict[str, Any] = {"name": run_dir.name, "project": PROJECT}
    return CometLogger(**defaults | settings, experiment_key=key), key


LOGGERS = {"wandb": _wandb, "mlflow": _mlflow, "comet": _comet}
