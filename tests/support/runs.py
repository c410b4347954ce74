"""Whole runs of the command line: what they train, when they have got somewhere, whether two ended alike."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import LIMIT, SMALL, checkpoint, environment, rows, start
from torch.utils._pytree import tree_flatten

# A step checkpoint every third step, in epochs of 22, with all that a checkpoint could forget.
RECIPE = [
    *SMALL,
    "--trainer.max_epochs=3",
    "--trainer.log_every_n_steps=1",
    "--save_every_n_steps=3",
    "--model.drop_path_rate=0.2",
    "--ema.decay=0.9",
]


TWO = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]


def assert_same(run: Path, whole: Path) -> None:
    got, expected = checkpoint(run), checkpoint(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        leaves, structure = tree_flatten(got[part])
        others, other_structure = tree_flatten(expected[part])
        assert structure == other_structure
        for ours, theirs in zip(leaves, others, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, part
    torch.testing.assert_close(got["callbacks"]["EMA"], expected["callbacks"]["EMA"], rtol=0, atol=0)
    assert rows(run) == rows(whole)


def wait_for_steps(run: Path, steps: int, job: subprocess.Popen) -> None:
    """Until the run has logged that many steps."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            if len(rows(run)) >= steps:
                return
        except OSError:
            pass
        assert job.poll() is None, job.stdout.read()
        time.sleep(0.02)
    raise AssertionError("the run does not get on")


# Long enough never to end by itself.
ENDLESS = [*SMALL, *TWO, "--trainer.max_epochs=1000", "--trainer.log_every_n_steps=1", "--data.num_workers=0"]


def torchrun(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *options)


def slurm_task(folder: Path, rank: int, *arguments: str) -> subprocess.Popen:
    """Start one of two tasks of a SLURM job on this machine."""
    job = dict(NTASKS="2", NTASKS_PER_NODE="2", NNODES="1", JOB_ID="7", JOB_NAME="train", NODEID="0")
    job |= dict(NODELIST="127.0.0.1", PROCID=str(rank), LOCALID=str(rank))
    slurm = {f"SLURM_{name}": value for name, value in job.items()} | {"MASTER_PORT": "29714"}
    # Not forked: Lightning reads its rank off the environment when it is imported.
    return start(folder, *arguments, env=environment() | slurm, command=(sys.executable,))
