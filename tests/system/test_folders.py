"""A run whose folder goes while it trains, and the size of its steps."""

import os

import pytest
import torch
from harness import SMALL, call, rows
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from modules import module, train
from runs import SLURM

from cait.cli import main
from cait.cli.lightning import CaiTCLI
from cait.run.loggers import run_loggers

FEW = """
--model.fields.depth=1 --trainer.limit_train_batches=2 --trainer.limit_val_batches=1 --trainer.max_epochs=2
--data.num_workers=0 --data.batch_size=8
"""
SHORT = [*SMALL, *FEW.split()]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    "hook",
    [
        "setup",
        "on_train_start",
        "on_train_batch_end",
        "on_validation_end",
        "on_train_end",
        "teardown",
    ],
)
def test_a_folder_that_has_gone_ends_the_run_and_is_not_made_again(hook, is_replaced, place):
    name = f"{hook}-{is_replaced}"
    run = place / "logs" / name
    lost = [
        "--trainer.callbacks+=misfortunes.LosesFolder",
        f"--trainer.callbacks.hook={hook}",
        f"--trainer.callbacks.is_replaced={is_replaced}",
    ]
    done = call(place, "fit", *SHORT, *lost, f"--run_name={name}")
    assert done.returncode == 2, done.stderr
    assert f"the folder logs/{name} was moved or removed" in done.stderr.splitlines()[-1]
    printed = done.stdout + done.stderr
    assert "cait resume" not in printed
    assert "cait eval" not in done.stdout
    assert "Traceback" not in printed
    files = [path for path in run.rglob("*") if path.is_file()]
    texts = {str(path.relative_to(run)): path.read_text() for path in files}
    names = ["checkpoints/last.ckpt", "metrics.csv", ".finished"] if is_replaced else []
    assert texts == dict.fromkeys(names, "of another run")
    assert run.exists() is is_replaced


def test_a_step_is_logged_with_the_loss_of_all_its_batches(tmp_path):
    """That its gradient is theirs too is in test_module.py."""
    losses = []
    keep = LambdaCallback(on_train_batch_end=lambda fit, net, out, *_: losses.append(out["loss"]))
    logged = dict(logger=run_loggers(tmp_path, 0), log_every_n_steps=1)
    train(module(), callbacks=[keep], accumulate_grad_batches=2, **logged)
    first, second = torch.tensor(losses).view(-1, 2).unbind(1)
    # Lightning has divided the loss of a batch by the number of accumulated ones
    expected = (first + second).tolist()
    assert [float(row["train/loss"]) for row in rows(tmp_path) if row["train/loss"]] == expected


def test_one_process_in_slurm_numbers_its_runs_and_is_not_requeued_by_lightning(here, monkeypatch):
    os.environ.update(SLURM)
    runs = []
    monkeypatch.setattr(CaiTCLI, "fit", lambda cli, *_, **__: runs.append(cli))
    (here / "my run (1).yaml").write_text("model: {lr: 1e-3}")
    for words in ([], [], ["--config=my run (1).yaml"]):
        main(["fit", *SMALL, "--trainer.devices=1", *words])
    assert [run.run_dir.name for run in runs] == ["digits", "digits-2", "my-run-1"]
    environment = runs[0].trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
