"""A run whose folder goes while it trains, and the size of its steps."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from harness import REPO, SMALL, call, rows
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from modules import images_in, module, trainer

from cait.cli import main
from cait.cli.lightning import CaiTCLI
from cait.run.loggers import run_loggers

SHORT = [
    *SMALL,
    "--model.fields.depth=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.max_epochs=2",
    "--data.num_workers=0",
]


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
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file()}
    expected = {"checkpoints/last.ckpt", "metrics.csv", ".finished"} if is_replaced else set()
    assert files.keys() == expected
    for path in files.values():
        assert path.read_text() == "of another run"
    assert run.exists() is is_replaced


def losses(root, accumulated, folder):
    """Of the steps of an epoch, as they are and as they are logged."""
    torch.manual_seed(0)
    steps: dict[int, float] = defaultdict(float)

    def add(fit, net, outputs, batch, batch_idx):
        # Lightning has divided the loss of a batch by the number of accumulated ones.
        steps[batch_idx // accumulated] += float(outputs["loss"])

    data = images_in(
        root, img_size=8, batch_size=64, global_batch=True, repeats=1, mixup=0.0, cutmix=0.0
    )
    fit = trainer(
        max_epochs=1,
        limit_val_batches=0,
        logger=run_loggers(folder, 0),
        log_every_n_steps=1,
        callbacks=[LambdaCallback(on_train_batch_end=add)],
        accumulate_grad_batches=accumulated,
    )
    fit.fit(module(num_classes=10, lr=1e-2, warmup_epochs=0, drop_path_rate=0.0), data)
    logged = [float(row["train/loss"]) for row in rows(folder) if row["train/loss"]]
    return torch.tensor([*steps.values()]), torch.tensor(logged)


def test_the_loss_curve_does_not_depend_on_accumulation(digits_root, tmp_path):
    whole, _ = losses(digits_root, 1, tmp_path / "whole")
    accumulated, logged = losses(digits_root, 2, tmp_path / "accumulated")
    assert len(whole) == 22
    assert whole.std() > 0.01
    torch.testing.assert_close(accumulated, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(logged, accumulated, rtol=0, atol=1e-5)  # of all batches of a step


def test_one_process_in_slurm_numbers_its_runs_and_is_not_requeued_by_lightning(here, monkeypatch):
    for name in ("NTASKS", "JOB_ID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NODELIST", "node1")
    runs: list[CaiTCLI] = []
    monkeypatch.setattr(CaiTCLI, "fit", lambda cli, *_, **__: runs.append(cli))
    (here / "my run (1).yaml").write_text("model: {lr: 1e-3}")
    for words in ([], [], ["--config=my run (1).yaml"]):
        main(["fit", *SMALL, "--trainer.devices=1", *words])
    assert [run.run_dir.name for run in runs] == ["digits", "digits-2", "my-run-1"]
    environment: Any = runs[0].trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_overlay_for_gpus_is_refused_in_a_line_without_one(cait):
    digits = str(REPO / "configs/digits.yaml")
    refused = cait("fit", "--config", digits, "--config", "trainer/gpu.yaml")
    assert refused.returncode == 2
    line = refused.stderr.splitlines()[-1]
    assert "--trainer.accelerator auto" in line
