"""W&B, MLflow and Comet beside metrics.csv: a run keeps its id there through resumes, and no step is sent twice."""

from __future__ import annotations

import json
import logging
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cait import disk
from cait.errors import UserError, one_line, to_install
from cait.run.loggers import RunCSVWriter

PROJECT = "cait"
"""The project of all runs in a tracker, unless --logger_args says otherwise."""


class SentSteps:
    """What a tracker knows of a run: the run's id there, and the last step of each metric that was sent.

    A resumed run repeats the steps after its checkpoint, with the same figures. They are not sent again. The file at
    `path` is written after a row is sent, so a kill in between repeats that row. A new run ignores it.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        there = resumed and path.is_file()
        content = disk.read_json(path, {"id?": str, "last?": {...: int}}, path.parent) if there else {}
        self.id: str | None = content.get("id")
        self.last: dict[str, int] = content.get("last") or {}

    @rank_zero_only
    def save(self, id: str) -> None:
        self.id = id
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(self.path) as beside:
            beside.write_text(json.dumps({"id": self.id, "last": self.last}))

    def unsent(self, metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """The metrics not yet sent for this step, with the epoch; empty if there are none."""
        found = {name: value for name, value in metrics.items() if name != "epoch" and step > self.last.get(name, -1)}
        return found | ({"epoch": metrics["epoch"]} if found and "epoch" in metrics else {})

    def note(self, metrics: Mapping[str, Any], step: int) -> None:
        assert self.id is not None
        self.last |= dict.fromkeys(metrics, step)
        self.save(self.id)


class SendOnce:
    """Send each figure once: a mixin in front of one of Lightning's loggers."""

    sent: SentSteps

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        unsent = self.sent.unsent(metrics, step or 0)
        if unsent:
            super().log_metrics(unsent, step)  # type: ignore[misc]
            self.sent.note(unsent, step or 0)

    @rank_zero_only
    def catch_up(self, run_dir: Path, first_step: int) -> None:
        """Send what metrics.csv has before `first_step` and the tracker lacks."""
        for row in RunCSVWriter(str(run_dir)).rows_before(first_step):
            step = int(row.pop("step"))
            self.log_metrics({name: float(value) for name, value in row.items() if value}, step)


class RunWandb(SendOnce, WandbLogger):
    """W&B takes the id that a run gives itself.

    W&B's own process writes to the disk now and then. A kill may lose rows that were sent, so W&B's files tell which
    rows are there.
    """

    def __init__(self, run_dir: Path, sent: SentSteps, **settings: Any) -> None:
        self.sent = sent
        id = sent.id or uuid.uuid4().hex[:8]
        defaults: dict[str, Any] = {"name": run_dir.name, "project": PROJECT, "save_dir": run_dir}
        super().__init__(**defaults | settings, id=id)
        if sent.id:
            sent.last = _stored_by_wandb(Path(self.save_dir or "."), id)
        sent.save(id)


class RunMLFlow(SendOnce, MLFlowLogger):
    """MLflow gives a run its id."""

    def __init__(self, run_dir: Path, sent: SentSteps, **settings: Any) -> None:
        for name in ("mlflow", "alembic"):  # else they list the tables of a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        self.sent = sent
        database = f"sqlite:///{(run_dir.parent / 'mlflow.db').resolve()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or database
        defaults: dict[str, Any] = {"experiment_name": PROJECT, "run_name": run_dir.name, "tracking_uri": uri}
        super().__init__(**defaults | settings, run_id=sent.id)
        sent.save(str(self.run_id))

    @property
    def save_dir(self) -> str | None:
        return None  # Lightning needs no folder here: all goes into the database

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """MLflow refuses a new value for a parameter, so a run that is resumed with one keeps the first."""
        if not self.experiment.get_run(self.run_id).data.params:
            super().log_hyperparams(params)


class RunComet(SendOnce, CometLogger):
    """Comet takes the key that a run gives itself."""

    def __init__(self, run_dir: Path, sent: SentSteps, **settings: Any) -> None:
        self.sent = sent
        key = sent.id or uuid.uuid4().hex
        folder = str(run_dir / "comet")
        defaults: dict[str, Any] = {"name": run_dir.name, "project": PROJECT, "offline_directory": folder}
        super().__init__(**defaults | settings, experiment_key=key)
        sent.save(key)

    def _create_experiment(self) -> None:
        import comet_ml

        self._comet_config = comet_ml.ExperimentConfig(**self._kwargs)  # Lightning disables an offline experiment
        super()._create_experiment()


LOGGERS: dict[str, Callable[..., Any]] = {"wandb": RunWandb, "mlflow": RunMLFlow, "comet": RunComet}


def tracker(name: str, settings: dict[str, Any], run_dir: Path, first_step: int) -> Logger:
    """Make and start the logger of a tracker, so that its errors come before training begins.

    Args:
        name: wandb, mlflow or comet.
        settings: arguments of Lightning's logger.
        first_step: steps that the run has done; 0 in a new run.

    Raises:
        UserError: its package is missing, or it cannot be reached.
    """
    if "api_key" in settings:  # config.yaml and the tracker would show it to everybody
        raise UserError(f"--logger_args.api_key would be written into the run; log in with `{name} login` instead")
    sent = SentSteps(run_dir / f"{name}.json", resumed=first_step > 0)
    try:
        logger = LOGGERS[name](run_dir, sent, **settings)
        _ = logger.experiment
        logger.catch_up(run_dir, first_step)
    except ModuleNotFoundError as error:
        hint = f"{to_install('comet-ml' if name == 'comet' else '[loggers]')} ({one_line(error)})"
        raise UserError(f"--logger {name} needs its package: {hint}") from error
    except Exception as error:
        raise UserError(f"--logger {name} cannot start: {one_line(error) or type(error).__name__}") from error
    return logger


def _stored_by_wandb(folder: Path, id: str) -> dict[str, int]:
    """The last step of each metric in the files that W&B has written of a run, offline or not."""
    last: dict[str, int] = {}
    for path in sorted(folder.glob(f"wandb/*run-*-{id}/*.wandb")):
        for record in wandb_records(path):
            items = record.history.item
            row = {item.key or item.nested_key[0]: item.value_json for item in items}
            if "trainer/global_step" in row:
                last |= dict.fromkeys(row, int(json.loads(row["trainer/global_step"])))
    return last


def wandb_records(path: Path) -> Iterator[Any]:
    """The records in a file of W&B: protocol buffers in the format of LevelDB's log. It may end within one."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    data, place, record = disk.open_file(path).read(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768  # in the block; a part of a record, at least 7 bytes, does not cross its end
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            try:
                yield wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined]
            except DecodeError:
                return
            record = b""
