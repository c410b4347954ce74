"""One machine or many: the size of a step, what a run says of itself, its speed, its plan and its job script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import REPO, SMALL, Cait, rows
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from modules import module, trainer
from runs import TWO

from cait.cli import main
from cait.cli.lightning import CaiTCLI
from cait.data.datamodule import ImageNetDataModule
from cait.data.loader import batches_a_step
from cait.errors import UserError
from cait.guards import configurations, trainer_checks
from cait.run.loggers import run_loggers

STEPS = 50


def data(root: Path, **settings: Any) -> ImageNetDataModule:
    common: dict[str, Any] = dict(root=str(root), img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    return ImageNetDataModule(**(common | settings))


class Losses(Callback):
    """The mean loss of each optimizer step."""

    def __init__(self) -> None:
        self.batches: dict[int, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx // trainer.accumulate_grad_batches
        self.batches.setdefault(step + 100 * trainer.current_epoch, []).append(float(outputs["loss"]))

    def curve(self) -> torch.Tensor:
        # Lightning has divided the loss of a batch by the number of accumulated ones.
        return torch.tensor([sum(losses) for _, losses in sorted(self.batches.items())])


class Saving(Checkpoint):
    """Save after the fifth step of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 27:
            trainer.save_checkpoint(self.path)


def train(root: Path, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any) -> torch.Tensor:
    """The losses of STEPS steps, or of those after a checkpoint's."""
    torch.manual_seed(0)
    given, losses = data(root, **settings), Losses()
    all_callbacks = [losses, *callbacks]
    settings_of_trainer: dict[str, Any] = dict(limit_val_batches=0, enable_checkpointing=True)
    settings_of_trainer["default_root_dir"] = root.parent  # where Lightning's own checkpoint goes
    fit = trainer(max_steps=STEPS, max_epochs=-1, callbacks=all_callbacks, **settings_of_trainer)
    given.share_batch(fit)
    net = module(num_classes=10, lr=1e-2, warmup_epochs=0, drop_path_rate=0.0)
    fit.fit(net, given, ckpt_path=ckpt_path, weights_only=True)
    assert fit.global_step == STEPS
    assert fit.accumulate_grad_batches == settings["global_batch"] // settings["batch_size"]
    return losses.curve()


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_accumulation_nor_on_a_resume(digits_root: Path, tmp_path: Path) -> None:
    last = tmp_path / "x.ckpt"
    whole = train(digits_root, Saving(last), batch_size=64, global_batch=64)
    assert len(whole) == STEPS
    assert whole.std() > 0.01
    torch.testing.assert_close(train(digits_root, batch_size=32, global_batch=64), whole, rtol=0, atol=1e-5)
    resumed = train(digits_root, batch_size=16, global_batch=64, ckpt_path=last)
    torch.testing.assert_close(resumed, whole[27:], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="images a batch, over all processes was 64, is 128"):
        train(digits_root, batch_size=16, global_batch=128, ckpt_path=last)


def test_steps_are_whole_and_the_logged_loss_is_of_all_their_batches(digits_root: Path, tmp_path: Path) -> None:
    losses = Losses()
    given = data(digits_root, batch_size=48, global_batch=144)  # 29 batches an epoch: 9 steps of 3
    fit = trainer(max_epochs=2, callbacks=[losses], logger=run_loggers(tmp_path / "run", 0), log_every_n_steps=1)
    fit.limit_val_batches = 0
    fit.fit(module(num_classes=10), given)
    assert fit.global_step == 18
    logged = [float(row["train/loss"]) for row in rows(tmp_path / "run") if row["train/loss"]]
    torch.testing.assert_close(torch.tensor(logged), losses.curve(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("images", "batch_size", "accumulate", "words"),
    [
        (100, 32, 1, r"100 is not a multiple of 1 process\(es\) × --data.batch_size 32"),
        (20, 32, 1, r"20 is not a multiple of 1 process\(es\) × --data.batch_size 32"),
        (64, 32, 2, r"--data.global_batch 64 chooses .*; leave out --trainer.accumulate_grad_batches 2"),
    ],
)
def test_a_step_that_cannot_be_filled_is_refused(images: int, batch_size: int, accumulate: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        batches_a_step(images, batch_size, trainer(accumulate_grad_batches=accumulate))


def test_an_overlay_of_the_trainer_does_not_name_the_run() -> None:
    assert configurations.recipe(["--config=configs/digits.yaml", "--config=configs/trainer/debug.yaml"]) == "digits"
    files = ["configs/trainer/gpu.yaml", "configs/imagenet/xxs24_224.yaml", "finetune_384.yaml"]
    assert configurations.recipe([f"--config={file}" for file in files]) == "finetune_384"
    assert configurations.recipe([]) == ""


def test_several_nodes_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="num_nodes 2: start it on every machine with torchrun or srun"):
        trainer_checks.check_trainer(trainer(num_nodes=2, devices=1, strategy="ddp"), True, False)


def test_one_process_in_slurm_numbers_its_runs_and_is_not_requeued_by_lightning(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = dict(NTASKS="1", JOB_ID="7", JOB_NAME="train", PROCID="0", LOCALID="0", NODEID="0", NODELIST="node1")
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.chdir(tmp_path)
    made: list[CaiTCLI] = []
    monkeypatch.setattr(CaiTCLI, "fit", lambda cli, *_, **__: made.append(cli))
    for _ in range(2):
        main(["fit", *SMALL, f"--data.root={digits_root}", "--trainer.devices=1"])
    assert [cli.run_dir.name for cli in made] == ["digits", "digits-2"]
    environment: Any = made[0].trainer._accelerator_connector.cluster_environment
    assert (type(environment), environment.auto_requeue) == (SLURMEnvironment, False)


def slurm(folder: Path, *arguments: str, status: int, **variables: str) -> tuple[int, list[str]]:
    """Run scripts/slurm.sbatch beside stand-ins for srun, scontrol and cait; the status and what they were told."""
    told = folder / "told"
    for name, body in {
        "bin/srun": f'echo "srun $@ on $SRUN_CPUS_PER_TASK" >> {told}; shift; exec "$@"',
        "bin/scontrol": f'echo "scontrol $@" >> {told}',
        ".venv/bin/cait": f"mkdir -p logs/mine/checkpoints; touch logs/mine/checkpoints/last.ckpt; exit {status}",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    slurms = dict(JOB_ID="7", JOB_NUM_NODES="3", NTASKS_PER_NODE="4", CPUS_PER_TASK="12")
    env = os.environ | {f"SLURM_{name}": value for name, value in slurms.items()} | variables
    env |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    told.unlink(missing_ok=True)
    done = subprocess.run(["bash", REPO / "scripts/slurm.sbatch", *arguments], cwd=folder, env=env, capture_output=True)
    return done.returncode, told.read_text().splitlines() if told.exists() else []


NODES = "--trainer.num_nodes=3 --trainer.devices=4 on 12"  # srun gives a task its cores only if told
REQUEUED = "scontrol requeue 7"


def test_the_job_script_starts_resumes_and_requeues(tmp_path: Path) -> None:
    assert slurm(tmp_path, status=0) == (2, [])  # without a run
    status, told = slurm(tmp_path, "mine", "--config", "a b.yaml", status=138)
    start = f"srun --wait=120 .venv/bin/cait fit --config a b.yaml --run_name mine {NODES}"
    assert (status, told) == (138, [start, REQUEUED])
    resumed = f"srun --wait=120 .venv/bin/cait resume mine --config a b.yaml {NODES}"
    assert slurm(tmp_path, "mine", "--config", "a b.yaml", status=0) == (0, [resumed])
    assert slurm(tmp_path, "mine", status=0) == (0, [f"srun --wait=120 .venv/bin/cait resume mine {NODES}"])


def test_a_job_that_goes_on_neither_starts_anew_nor_adds_to_its_lists_twice(tmp_path: Path) -> None:
    start = ["--ckpt_path", "old.ckpt", "--from=timm", "--paper", "table1/x", "--model.lr", "1", "--a.b+=c", "--a.b+=d"]
    slurm(tmp_path, "mine", *start, status=138)
    _, (told, _) = slurm(tmp_path, "mine", *start, status=138)
    assert told == f"srun --wait=120 .venv/bin/cait resume mine --a.b=null --model.lr 1 --a.b+=c --a.b+=d {NODES}"


@pytest.mark.parametrize("status", [1, 134, 137])  # a lost process, an abort of NCCL's, a kill
def test_a_job_that_failed_is_tried_again_so_many_times(status: int, tmp_path: Path) -> None:
    def requeues(status: int, **variables: str) -> bool:
        exits, told = slurm(tmp_path, "mine", status=status, **variables)
        assert exits == status
        return told[1:] == [REQUEUED]

    assert [requeues(status) for _ in range(6)] == 5 * [True] + [False]
    assert requeues(138)  # it has trained until its time was over, so the count begins again
    assert [requeues(status, FAILURES="2") for _ in range(3)] == [True, True, False]
    assert not requeues(2)  # the user's error
    assert not requeues(143)  # asked to stop
    assert not requeues(0)
    assert [path.name for path in tmp_path.glob("slurm-*")] == []


@pytest.mark.slow
def test_a_global_batch_gives_two_processes_the_curve_of_one(cait: Cait, tmp_path: Path) -> None:
    recipe = [*SMALL, "--data.global_batch=64", "--data.mixup=0", "--data.cutmix=0", "--model.drop_path_rate=0"]
    recipe += ["--trainer.max_epochs=3", "--trainer.log_every_n_steps=1"]
    curves = []
    for name, options in {"one": ["--data.batch_size=64"], "two": [*TWO, "--data.batch_size=32"]}.items():
        done = cait("fit", *recipe, *options, f"--run_name={name}")
        assert done.returncode == 0, done.stderr
        losses = [float(row["train/loss"]) for row in rows(tmp_path / "logs" / name) if row["train/loss"]]
        curves.append(torch.tensor(losses))
    assert len(curves[0]) == 66
    torch.testing.assert_close(curves[1][:STEPS], curves[0][:STEPS], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["cpu", "debug", "profile"])
def test_the_overlays_run(overlay: str, cait: Cait, tmp_path: Path) -> None:
    overlays = ["--config", str(REPO / f"configs/trainer/{overlay}.yaml"), "--trainer.accelerator=cpu"]
    done = cait("fit", "--config", str(REPO / "configs/digits.yaml"), *overlays, "--trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "logs/digits"
    if overlay == "profile":
        assert "ProfilerStep*" in (table := (run / "fit-profile.txt").read_text())
        assert table.split("ProfilerStep*")[1].split("\n")[0].split()[-1] == "3"
        assert len(list(run.glob("fit-profile*.pt.trace.json"))) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_overlay_for_gpus_is_refused_in_a_line_without_one(cait: Cait) -> None:
    refused = cait("fit", "--config", str(REPO / "configs/digits.yaml"), "--config", "trainer/gpu.yaml")
    assert refused.returncode == 2
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("cait: error: --trainer.accelerator gpu: this machine has no GPU that PyTorch can use; ")
