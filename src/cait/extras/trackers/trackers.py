"""Lightning's loggers of W&B, MLflow and Comet; a run keeps its id there through resumes."""

import logging
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cait import disk
from cait.errors import UserError, one_line
from cait.settings import Settings, flatten

PROJECT = "cait"
"""The project of all runs in a tracker, unless --logger_args says otherwise."""
MOST = 250
"""Signs of a name in MLflow."""


class RunMLFlow(MLFlowLogger):
    """MLflow refuses a new value for a parameter, so a run that is resumed with one keeps the first.

    It refuses some names, so "recall@5" and "size (mm)" become "recall_5" and "size _mm_" there.
    """

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        if not self.experiment.get_run(self.run_id).data.params:
            super().log_hyperparams(renamed(flatten(dict(params))))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(renamed(metrics), step)


def renamed(values: Mapping[str, Any]) -> Settings:
    """The values under names that MLflow takes: letters, digits and _ . - in a path of at most 250 signs, all apart."""
    renamed: Settings = {}
    for name, value in values.items():
        new = (
            posixpath.normpath(re.sub(r"[^A-Za-z0-9_./ -]", "_", name)).lstrip("./")[-MOST:] or "_"
        )
        while new in renamed:
            new = f"{new}_"[-MOST:]
        renamed[new] = value
    return renamed


def tracker(name: str, settings: Settings, run_dir: Path) -> Logger:
    """Make and start the logger of a tracker, so that its errors come before training begins.

    A run that is resumed goes on under the id that it has there, which its folder holds. Raises UserError if the
    tracker cannot start, because its package is missing or it cannot be reached.
    """
    if "api_key" in settings:  # config.yaml and the tracker would show it to everybody
        raise UserError(
            f"--logger_args.api_key would be written into the run; log in with `{name} login` instead"
        )
    path = run_dir / f"{name}.json"
    known = disk.read_json(path, {"id": str})["id"] if path.is_file() else None
    try:
        logger, id = _make(name, settings, run_dir, known)
        _ = logger.experiment
    except Exception as error:  # whatever the tracker's client raises
        raise UserError(
            f"--logger {name} cannot start: {one_line(error) or type(error).__name__}"
        ) from error
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        run_dir.mkdir(parents=True, exist_ok=True)
        disk.write_json(path, {"id": id})
    return logger


def _make(name: str, settings: Settings, run_dir: Path, known: str | None) -> tuple[Any, str]:
    """A tracker's logger, and the id of the run there: the `known` one, or a new one."""
    defaults: Settings = {"name": run_dir.name, "project": PROJECT}
    id = known or uuid.uuid4().hex
    if name == "wandb":
        return WandbLogger(**defaults | {"save_dir": run_dir} | settings, id=id), id
    if name == "comet":
        return CometLogger(**defaults | settings, experiment_key=id), id
    for package in ("mlflow", "alembic"):  # else they list the tables of a new database
        logging.getLogger(package).setLevel(logging.WARNING)
    uri = (
        os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}"
    )
    defaults = {"experiment_name": PROJECT, "run_name": run_dir.name, "tracking_uri": uri}
    logger = RunMLFlow(**defaults | settings, run_id=known)
    return logger, str(logger.run_id)
