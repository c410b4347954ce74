"""W&B, MLflow and Comet: one id through resumes, each step once, and loggers of one's own beside the run's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import LIMIT, SMALL, Cait, rows, start

from cait.errors import UserError
from cait.extras import trackers
from cait.extras.trackers.trackers import SentSteps, tracker, wandb_records
from cait.run.loggers import RunCSVLogger, run_loggers

SHORT = [*SMALL, "--model.fields.depth=1", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]


def test_each_figure_is_sent_once(tmp_path: Path) -> None:
    sent = SentSteps(tmp_path / "x.json", resumed=False)
    sent.save("a")
    for step in range(5):
        assert sent.unsent({"epoch": 0, "train/loss": 1.0}, step) == {"epoch": 0, "train/loss": 1.0}
        sent.note({"train/loss": 1.0}, step)
    again = SentSteps(tmp_path / "x.json", resumed=True)
    assert again.id == "a"
    assert again.unsent({"epoch": 0, "train/loss": 1.0}, 4) == {}
    assert again.unsent({"epoch": 0, "val/loss": 1.0}, 4) == {"epoch": 0, "val/loss": 1.0}
    assert again.unsent({"epoch": 0, "train/loss": 1.0}, 5)
    assert SentSteps(tmp_path / "x.json", resumed=False).unsent({"train/loss": 1.0}, 4)  # a new run of this name


def test_mlflow_goes_on_with_the_run_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    store = {"tracking_uri": f"file:{tmp_path / 'store'}"}
    first = tracker("mlflow", store, tmp_path / "one", 0)
    first.log_hyperparams({"lr": 1})
    for step in range(6):
        first.log_metrics({"epoch": 0, "loss": float(step)}, step)
    second = tracker("mlflow", store, tmp_path / "one", 4)
    second.log_hyperparams({"lr": 2})
    for step in range(4, 8):
        second.log_metrics({"epoch": 0, "loss": float(step)}, step)
    second.finalize("success")
    client = first.experiment
    assert second.run_id == first.run_id
    assert [metric.step for metric in client.get_metric_history(first.run_id, "loss")] == [*range(8)]
    known = client.get_run(first.run_id)
    assert (known.info.run_name, known.info.status, known.data.params) == ("one", "FINISHED", {"lr": "1"})
    assert tracker("mlflow", store, tmp_path / "one", 0).run_id != first.run_id


def test_what_a_tracker_lacks_comes_from_metrics_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store, one = {"tracking_uri": f"file:{tmp_path / 'store'}"}, tmp_path / "one"
    (table,) = [logger for logger in run_loggers(one, 0) if isinstance(logger, RunCSVLogger)]
    for step in range(6):
        table.log_metrics({"epoch": step // 3, "loss": step / 3}, step)
    late = tracker("mlflow", store, one, 4)  # named when the run is resumed at its fourth step
    late.log_metrics({"epoch": 1, "loss": 4 / 3}, 4)
    sent = late.experiment.get_metric_history(late.run_id, "loss")
    assert [(metric.step, metric.value) for metric in sent] == [(step, step / 3) for step in range(5)]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("wandb", {"projekt": 1}, "--logger wandb cannot start: .*projekt"),
        ("wandb", None, r"--logger wandb needs its package: \.venv/bin/pip install --editable '\.\[loggers\]'"),
        ("comet", None, r"--logger comet needs its package: \.venv/bin/pip install comet-ml"),
        ("mlflow", {"tracking_uri": "file:/proc/none"}, "--logger mlflow cannot start: "),
        ("comet", {"api_key": "secret"}, "--logger_args.api_key would be written into the run"),
    ],
)
def test_what_cannot_start_says_why(
    name: str, settings: dict | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings is None:
        monkeypatch.setitem(sys.modules, {"wandb": "wandb", "comet": "comet_ml"}[name], None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match=message) as error:
        tracker(name, settings or {}, tmp_path / "one", 0)
    assert "\n" not in str(error.value)


def test_arguments_without_a_tracker_are_refused() -> None:
    run: Any = SimpleNamespace(config=SimpleNamespace(logger=None, logger_args={"project": "mine"}))
    with pytest.raises(UserError, match=r"--logger_args are for a tracker: name it with --logger, or leave them out"):
        trackers.loggers(run)


def in_wandb(folder: Path) -> tuple[set[str], set[str], list[int], int]:
    """(ids, names, the steps with a loss, parameters) in a run's offline logs"""
    ids, names, steps, settings = set(), set(), [], 0
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                names.add(record.run.display_name)
            elif record.WhichOneof("record_type") == "config":
                settings += len(record.config.update)
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                steps += [row["trainer/global_step"]] if "train/loss" in row else []
    return ids, names, steps, settings


def in_mlflow(folder: Path) -> tuple[set[str], set[str], list[int], int]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'cait'")
    (found,) = client.search_runs([experiment.experiment_id])
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    return {found.info.run_id}, {found.info.run_name}, steps, len(found.data.params)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("wandb", "{offline: true}"), ("mlflow", "{}")])
def test_a_killed_run_goes_on_under_its_id_without_a_step_twice(
    name: str, settings: str, tmp_path: Path, digits_root: Path, cait: Cait
) -> None:
    folder = tmp_path / "logs/one"
    recipe = ["--run_name=one", f"--logger={name}", f"--logger_args={settings}", "--trainer.max_epochs=2"]
    job = start(tmp_path, "fit", *SHORT, *recipe, "--save_every_n_steps=6")
    end = time.monotonic() + LIMIT
    # Two steps past a checkpoint, so that some come again.
    while not ((folder / f"{name}.json").exists() and at(folder, name) % 6 in (2, 3) and at(folder, name) > 12):
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < end
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    before = at(folder, name)
    resumed = cait("resume", "one")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    first = min(int(row["step"]) for row in rows(folder)[-1:])
    assert first >= before
    ids, names, steps, parameters = {"wandb": in_wandb, "mlflow": in_mlflow}[name](folder)
    assert ids == {json.loads((folder / f"{name}.json").read_text())["id"]}
    assert names == {"one"}
    assert sorted(steps) == [*range(44)]
    assert parameters > 20


def at(folder: Path, name: str) -> int:
    """The last step whose loss was sent."""
    return json.loads((folder / f"{name}.json").read_text())["last"].get("train/loss", 0)


@pytest.mark.slow
def test_loggers_of_ones_own_add_to_the_runs(cait: Cait, tmp_path: Path) -> None:
    """Logger, callback, dry run: metrics.csv and config.yaml stay in the run's folder, which resumes."""
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=own", "--trainer.limit_train_batches=2"]
    done = cait("fit", *SHORT, *own, "--run_name=one", "--trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs/one"
    assert [row["step"] for row in rows(folder) if row["train/loss"]] == ["0", "1"]
    (theirs,) = (tmp_path / "own").rglob("metrics.csv")
    assert "train/loss" in theirs.read_text()
    resumed = cait("resume", "one", "--trainer.max_epochs=2")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in rows(folder) if row["train/loss"]] == ["0", "1", "2", "3"]
    shutil.rmtree(folder)
    link = ["--logger=wandb", "--trainer.fast_dev_run=true", "--run_name=dry"]
    dry = cait("fit", *SHORT, *own, *link)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "logs/dry").exists()
    assert not list(tmp_path.rglob("offline-run-*"))
    missing = cait("fit", *SHORT, "--trainer.logger=lightning.pytorch.loggers.NeptuneLogger", "--run_name=no")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1, missing.stderr
    assert "NeptuneLogger" in missing.stderr
