"""W&B, MLflow and Comet: one id through resumes."""

from types import SimpleNamespace

import pytest
from harness import SMALL, call, ended, parsed, python, works

from cait import disk
from cait.extras.trackers import callbacks
from cait.extras.trackers.trackers import tracker


@pytest.fixture
def store(tmp_path, monkeypatch):
    """MLflow's; a database takes seconds to make."""
    address = f"file:{tmp_path / 'store'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    return address


SHORT = """
    --trainer.max_steps=3 --trainer.log_every_n_steps=1 --trainer.limit_val_batches=0 --data.num_workers=0
    --logger=mlflow
"""


@pytest.mark.usefixtures("cait")
def test_a_resumed_run_goes_on_in_mlflow_under_its_id(tmp_path, store):
    from mlflow.tracking import MlflowClient  # which takes seconds

    run = ended(tmp_path, "one", [*SMALL, *SHORT.split()])
    works(call(tmp_path, "resume", "one", "--trainer.max_steps=5", "--model.lr=1e-4"))
    client = MlflowClient(store)
    [experiment] = client.search_experiments(filter_string="name = 'cait'")
    [tracked] = client.search_runs([experiment.experiment_id])
    assert (tracked.info.run_name, tracked.info.status) == ("one", "FINISHED")
    assert tracked.data.params["lr"] == "0.002"
    number = tracked.info.run_id
    assert number == parsed(run / "mlflow.json")["id"]
    steps = [metric.step for metric in client.get_metric_history(number, "train/loss")]
    assert steps == [*range(5)]


ODD = [
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


@pytest.mark.usefixtures("store")
def test_names_that_mlflow_refuses_are_renamed_for_it(tmp_path):
    logger = tracker("mlflow", {}, tmp_path / "one")
    logger.log_metrics(dict.fromkeys(ODD, 1.0), 1)
    logger.log_hyperparams({name: name for name in ODD})
    logged = logger.experiment.get_run(logger.run_id).data
    assert len(logged.metrics) == len(logged.params) == len(ODD)
    assert {"recall_5", "f1 _macro_", "a/b"} <= logged.metrics.keys()


def test_a_missing_package_is_told_before_pytorch_is_imported():
    code = """
import sys
from importlib import util
find = util.find_spec
util.find_spec = lambda name: None if name == "comet_ml" else find(name)
from cait.cli import main
sys.modules["torch"] = None
main(["fit", "--logger=comet"])
"""
    line = "cait: error: --logger comet needs its package: .venv/bin/pip install comet-ml\n"
    assert python(code).stderr == line


def test_a_run_inside_another_is_not_tracked(tmp_path):
    """One from scratch that races: if it takes the other's place, it goes on under the id that this has."""
    (tmp_path / "config.yaml").touch()
    config = SimpleNamespace(logger="mlflow", logger_args={})
    trainer = SimpleNamespace(logger=True, fast_dev_run=False)
    run = SimpleNamespace(config=config, trainer=trainer, folder=tmp_path / "scratch")
    assert callbacks(run) == []
    assert not (tmp_path / "scratch").exists()


def test_wandb_offline_keeps_its_id(tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "one"
    for _ in range(2):
        logger = tracker("wandb", {"offline": True}, folder)
        logger.experiment.finish()
        disk.check_inside(folder)  # although it has a link to the user's cache
        assert logger.version == parsed(folder / "wandb.json")["id"]
