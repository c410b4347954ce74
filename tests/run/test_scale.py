"""One machine or many: the size of a step, the name of a run, its job script."""

import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from harness import REPO, SMALL, Cait, rows
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from modules import module, trainer

from cait.cli import command, main
from cait.cli.lightning import CaiTCLI
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.guards import configurations, refusals
from cait.run.loggers import run_loggers
from cait.run.program import Processes


def train(root: Path, accumulated: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the steps of an epoch, as they are and as they are logged."""
    torch.manual_seed(0)
    common: dict[str, Any] = dict(img_size=8, num_workers=0, repeats=1, mixup=0.0, cutmix=0.0)
    given, losses = (
        ImageNetDataModule(str(root), batch_size=64, global_batch=True, **common),
        defaultdict(float),
    )

    def add(fit: Trainer, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning has divided the loss of a batch by the number of accumulated ones.
        losses[batch_idx // accumulated] += float(outputs["loss"])

    settings: dict[str, Any] = dict(
        limit_val_batches=0, logger=run_loggers(folder, 0), log_every_n_steps=1
    )
    settings |= dict(
        callbacks=[LambdaCallback(on_train_batch_end=add)], accumulate_grad_batches=accumulated
    )
    fit = trainer(max_epochs=1, **settings)
    fit.fit(module(num_classes=10, lr=1e-2, warmup_epochs=0, drop_path_rate=0.0), given)
    logged = [float(row["train/loss"]) for row in rows(folder) if row["train/loss"]]
    return torch.tensor([*losses.values()]), torch.tensor(logged)


def test_the_loss_curve_does_not_depend_on_accumulation(digits_root: Path, tmp_path: Path) -> None:
    whole, _ = train(digits_root, 1, tmp_path / "whole")
    parts, logged = train(digits_root, 2, tmp_path / "parts")
    assert len(whole) == 22
    assert whole.std() > 0.01
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(logged, parts, rtol=0, atol=1e-5)  # of all batches of a step


def test_an_overlay_of_the_trainer_does_not_name_the_run() -> None:
    for files, name in (
        ("digits.yaml trainer/debug.yaml", "digits"),
        ("trainer/gpu.yaml digits.yaml base.yaml", "base"),
    ):
        paths = map(configurations.find_config, files.split())
        assert (
            configurations.recipe((path, configurations.settings(path)) for path in paths) == name
        )
    assert configurations.recipe([(None, {"model": {}})]) == ""


def test_several_nodes_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        UserError, match="num_nodes 2: start it on every machine with torchrun or srun"
    ):
        refusals.check_processes(trainer(num_nodes=2, devices=1, strategy="ddp"), 1)


def launched(launcher: str, processes: int, nodes: int) -> dict[str, str]:
    """The variables of the first process that a launcher starts."""
    each = processes // nodes
    if launcher == "torchrun":
        own = dict(RANK="0", LOCAL_RANK="0", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(each))
        own |= dict(
            WORLD_SIZE=str(processes),
            GROUP_WORLD_SIZE=str(nodes),
            MASTER_ADDR="node1",
            MASTER_PORT="1",
        )
        return own | dict(TORCHELASTIC_RUN_ID="7")
    own = dict(
        NTASKS=str(processes),
        NTASKS_PER_NODE=str(each),
        NNODES=str(nodes),
        JOB_ID="7",
        JOB_NAME="train",
    )
    own |= dict(PROCID="0", LOCALID="0", NODEID="0", NODELIST="node1")
    return {f"SLURM_{name}": value for name, value in own.items()}


@pytest.mark.parametrize("launcher", ["torchrun", "SLURM"])
@pytest.mark.parametrize("processes", [1, 2, 6])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("asked", ["1", 1, "auto", 3])
def test_a_launchers_processes_train_one_run_or_are_refused(
    launcher: str, processes: int, nodes: int, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never as many runs as there are processes, whatever the recipe asks for."""
    for name, value in launched(launcher, processes, nodes := min(nodes, processes)).items():
        monkeypatch.setenv(name, value)
    given = dict(devices=asked, num_nodes=1)
    started = Processes()
    started.follow_launcher(given)
    if processes > 1 and asked != 3:
        assert given == dict(devices=processes // nodes, num_nodes=nodes)
    fit = trainer(strategy="auto", **given)
    if fit.num_devices * fit.num_nodes == processes:
        refusals.check_processes(fit, started.started())
        assert fit.world_size == processes
    else:
        assert asked == 3
        with pytest.raises(
            UserError, match=f"make {3 * fit.num_nodes} processes, {processes} were started"
        ):
            refusals.check_processes(fit, started.started())


def test_one_process_in_slurm_numbers_its_runs_and_is_not_requeued_by_lightning(
    tmp_path: Path, digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = dict(
        NTASKS="1",
        JOB_ID="7",
        JOB_NAME="train",
        PROCID="0",
        LOCALID="0",
        NODEID="0",
        NODELIST="node1",
    )
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.chdir(tmp_path)
    made: list[CaiTCLI] = []
    monkeypatch.setattr(CaiTCLI, "fit", lambda cli, *_, **__: made.append(cli))
    for _ in range(2):
        main(["fit", *SMALL, f"--data.root={digits_root}", "--trainer.devices=1"])
    Path("my run (1).yaml").write_text("model: {lr: 1e-3}")
    main(
        [
            "fit",
            *SMALL,
            f"--data.root={digits_root}",
            "--trainer.devices=1",
            "--config=my run (1).yaml",
        ]
    )
    assert [cli.run_dir.name for cli in made] == ["digits", "digits-2", "my-run-1"]
    environment: Any = made[0].trainer._accelerator_connector.cluster_environment
    assert (type(environment), environment.auto_requeue) == (SLURMEnvironment, False)


def slurm(
    folder: Path, *arguments: str, status: int, says: str = "", **variables: str
) -> tuple[int, list[str]]:
    """Run scripts/slurm.sbatch beside stand-ins for srun, scontrol and cait; the status and what they were told.

    `says` are lines that srun itself prints.
    """
    told = folder / "told"
    for name, body in {
        "bin/srun": f'echo "srun $@ on $SRUN_CPUS_PER_TASK" >> {told}; echo "{says}" >&2; shift; exec "$@"',
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
    done = subprocess.run(
        ["bash", REPO / "scripts/slurm.sbatch", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
    )
    return done.returncode, told.read_text().splitlines() if told.exists() else []


NODES = (
    "--trainer.num_nodes=3 --trainer.devices=4 on 12"  # srun gives a task its cores only if told
)
REQUEUED = "scontrol requeue 7"


def test_the_job_script_starts_resumes_and_requeues(tmp_path: Path) -> None:
    assert slurm(tmp_path, status=0) == (2, [])  # without a run
    first = [
        "--config",
        "a b.yaml",
        "--ckpt_path",
        "old.ckpt",
        "--from=timm",
        "--paper",
        "table1/x",
        "--a.b+=c",
    ]
    status, told = slurm(tmp_path, "mine", *first, status=138)
    given = " ".join(first)
    assert (status, told) == (
        138,
        [f"srun --wait=120 .venv/bin/cait fit {given} --run_name mine {NODES}", REQUEUED],
    )
    # It neither starts anew nor adds to its lists twice.
    resumed = (
        f"srun --wait=120 .venv/bin/cait resume mine --a.b=null --config a b.yaml --a.b+=c {NODES}"
    )
    assert slurm(tmp_path, "mine", *first, status=0) == (0, [resumed])
    assert slurm(tmp_path, "mine", status=0) == (
        0,
        [f"srun --wait=120 .venv/bin/cait resume mine {NODES}"],
    )


def test_a_task_of_an_array_has_its_number_in_the_words(tmp_path: Path) -> None:
    words = ("seed-%a", "--seed_everything=%a", "--a=b%c")
    _, told = slurm(tmp_path, *words, status=0, SLURM_ARRAY_TASK_ID="12")
    [started] = told
    assert f"cait fit --seed_everything=12 --a=b%c --run_name seed-12 {NODES}" in started
    _, told = slurm(tmp_path, "mine", "--a=b%a", status=0)  # no array
    assert "--a=b%a" in told[0]


def test_a_job_that_failed_is_tried_again_so_many_times(tmp_path: Path) -> None:
    def requeues(status: int, **more: str) -> bool:
        exits, told = slurm(tmp_path, "mine", status=status, **more)
        assert exits == status
        return told[1:] == [REQUEUED]

    lost = 137  # a process was killed
    assert [requeues(lost, FAILURES="2") for _ in range(3)] == [True, True, False]
    assert requeues(138)  # it has trained until its time was over, so the count begins again
    assert requeues(lost)
    assert not requeues(2)  # the user's error
    ends = (
        "srun: error: n1: task 3: Exited with exit code {}\nsrun: error: n2: tasks 0-2,4-63: Killed"
    )
    assert [requeues(lost, says=ends.format(first)) for first in (1, 22)] == [True, True]
    # and no more: srun's status is of those it killed
    told = [f"srun --wait=120 .venv/bin/cait resume mine {NODES}"]
    assert slurm(tmp_path, "mine", status=lost, says=ends.format(2)) == (2, told)
    # killed by SIGUSR1 before it trained: no time limit that it will ever get beyond
    killed = "srun: error: n1: task 0: User defined signal 1"
    statuses = [slurm(tmp_path, "mine", status=138, says=killed, FAILURES="2") for _ in range(3)]
    assert [(status, told[1:]) for status, told in statuses] == [
        (1, [REQUEUED]),
        (1, [REQUEUED]),
        (1, []),
    ]
    assert not requeues(143)  # asked to stop
    assert not requeues(0)
    assert [path.name for path in tmp_path.glob("slurm-*")] == []


@pytest.mark.parametrize(
    ("started", "says", "status"),
    [
        (1, "Connection reset by peer", 2),
        (64, "Connection reset by peer", 1),
        (64, "CUDA out of memory", 2),
    ],
)
def test_the_process_that_is_the_cause_exits_with_2(
    started: int, says: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_run", Mock(side_effect=RuntimeError(says)))
    monkeypatch.setattr(Processes, "started", lambda _: started)
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == status


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_overlay_for_gpus_is_refused_in_a_line_without_one(cait: Cait) -> None:
    refused = cait(
        "fit", "--config", str(REPO / "configs/digits.yaml"), "--config", "trainer/gpu.yaml"
    )
    assert refused.returncode == 2
    line = refused.stderr.splitlines()[-1]
    assert line.startswith(
        "cait: error: no supported gpu backend found: take --trainer.accelerator auto"
    )
