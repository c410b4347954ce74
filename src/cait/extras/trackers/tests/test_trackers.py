"""W&B, MLflow and Comet: one id through resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import SMALL

from cait.cli import main
from cait.errors import UserError
from cait.extras.trackers.trackers import tracker

SHORT = [*SMALL, "--model.fields.depth=1", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]


def test_mlflow_goes_on_with_the_run_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    store = {"tracking_uri": f"file:{tmp_path / 'store'}"}
    first = tracker("mlflow", store, tmp_path / "one", resumed=False)
    first.log_hyperparams({"lr": 1})
    first.log_metrics({"epoch": 0, "loss": 0.0}, 0)
    second = tracker("mlflow", store, tmp_path / "one", resumed=True)
    second.log_hyperparams({"lr": 2})
    second.log_metrics({"epoch": 0, "loss": 1.0}, 1)
    second.finalize("success")
    client = first.experiment
    assert second.run_id == first.run_id
    assert [metric.step for metric in client.get_metric_history(first.run_id, "loss")] == [0, 1]
    known = client.get_run(first.run_id)
    assert (known.info.run_name, known.info.status, known.data.params) == ("one", "FINISHED", {"lr": "1"})
    assert tracker("mlflow", store, tmp_path / "one", resumed=False).run_id != first.run_id


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("wandb", {"projekt": 1}, "--logger wandb cannot start: .*projekt"),
        ("comet", {}, "--logger comet cannot start: .*comet-ml"),
        ("mlflow", {"tracking_uri": "file:/proc/none"}, "--logger mlflow cannot start: "),
        ("comet", {"api_key": "secret"}, "--logger_args.api_key would be written into the run"),
    ],
)
def test_what_cannot_start_says_why(
    name: str, settings: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match=message) as error:
        tracker(name, settings, tmp_path / "one", resumed=False)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_mlflow_under_its_id(here: Path) -> None:
    from mlflow.tracking import MlflowClient

    main(["fit", *SHORT, "--run_name=one", "--logger=mlflow", "--trainer.max_steps=3", "--trainer.limit_val_batches=0"])
    main(["resume", "one", "--trainer.max_steps=5"])
    client = MlflowClient(f"sqlite:///{here / 'logs/mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'cait'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "one"
    assert found.info.run_id == json.loads((here / "logs/one/mlflow.json").read_text())["id"]
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert steps == [*range(5)]
    assert len(found.data.params) > 20


def test_wandb_offline_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    first = tracker("wandb", {"offline": True}, tmp_path / "one", resumed=False)
    first.experiment.finish()
    again = tracker("wandb", {"offline": True}, tmp_path / "one", resumed=True)
    assert again.version == first.version == json.loads((tmp_path / "one/wandb.json").read_text())["id"]
    again.experiment.finish()
