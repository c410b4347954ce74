"""W&B, MLflow and Comet: one id through resumes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import SMALL, python
from mlflow.tracking import MlflowClient

from cait import disk
from cait.cli import main
from cait.errors import UserError
from cait.extras.trackers import callbacks
from cait.extras.trackers.trackers import tracker

SHORT = [*SMALL, "--model.fields.depth=1", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]


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
        tracker(name, settings, tmp_path / "one")
    assert "\n" not in str(error.value)


def test_a_resumed_run_goes_on_in_mlflow_under_its_id(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{here / 'store'}")
    main(
        [
            "fit",
            *SHORT,
            "--run_name=one",
            "--logger=mlflow",
            "--trainer.max_steps=3",
            "--trainer.limit_val_batches=0",
        ]
    )
    main(["resume", "one", "--trainer.max_steps=5", "--model.lr=1e-4"])
    client = MlflowClient(f"file:{here / 'store'}")
    (experiment,) = client.search_experiments(filter_string="name = 'cait'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.data.params["lr"]) == (
        "one",
        "FINISHED",
        "0.002",
    )
    assert found.info.run_id == json.loads((here / "logs/one/mlflow.json").read_text())["id"]
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert steps == [*range(5)]


def test_names_that_mlflow_refuses_are_renamed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    odd = [
        "recall@5",
        "recall#5",
        "größe",
        "/z",
        "a//b",
        "a/../b",
        "..",
        "",
        "x" * 300,
        "tab\tname",
        "f1 (macro)",
    ]
    logger = tracker("mlflow", {}, tmp_path / "one")
    logger.log_metrics(dict.fromkeys(odd, 1.0), 1)
    logger.log_hyperparams({name: name for name in odd})
    logged = logger.experiment.get_run(logger.run_id).data
    assert len(logged.metrics) == len(logged.params) == len(odd)
    assert {"recall_5", "f1 _macro_", "a/b"} <= logged.metrics.keys()


def test_a_missing_package_is_told_before_pytorch_is_imported() -> None:
    hide = "from importlib import util; f = util.find_spec; util.find_spec = lambda n: None if n=='comet_ml' else f(n)"
    run = "from cait.cli import main; sys.modules['torch'] = None; main(['fit', '--logger=comet'])"
    told = python(f"import sys; {hide}; {run}").stderr
    assert told == "cait: error: --logger comet needs its package: .venv/bin/pip install comet-ml\n"


def test_a_run_inside_another_is_not_tracked(tmp_path: Path) -> None:
    """One from scratch that races: if it takes the other's place, it goes on under the id that this has."""
    (tmp_path / "config.yaml").touch()
    trainer = SimpleNamespace(logger=True, fast_dev_run=False)
    config = SimpleNamespace(logger="mlflow", logger_args={})
    run: Any = SimpleNamespace(
        config=config, trainer=trainer, folder=tmp_path / "scratch", first_step=0
    )
    assert callbacks(run) == []
    assert not (tmp_path / "scratch").exists()


def test_wandb_offline_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    first = tracker("wandb", {"offline": True}, tmp_path / "one")
    first.experiment.finish()
    disk.check_inside(tmp_path / "one")  # although it has a link to the user's cache
    again = tracker("wandb", {"offline": True}, tmp_path / "one")
    assert (
        again.version
        == first.version
        == json.loads((tmp_path / "one/wandb.json").read_text())["id"]
    )
    again.experiment.finish()
