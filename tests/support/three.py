"""Train on three processes: whole runs, and the same ones stopped amid an epoch and resumed.

    python three.py FOLDER DIGITS

Their last checkpoints are FOLDER/<run>/whole/last.ckpt and FOLDER/<run>/stopped/last.ckpt. All processes are forks of
this one, so that the imports are made once.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from harness import free_port
from lightning.pytorch.strategies import DDPStrategy
from modules import FIELDS, images_in, module, trainer
from own_parts import Net
from torch.multiprocessing import start_processes

from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import EMA, StepSeed

PROCESSES = 3


class Branches(torch.nn.Module):
    """Each process takes one of two ways in each step, at random."""

    def __init__(self, img_size: int, num_classes: int) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList(Net(img_size, num_classes) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.ways[int(torch.rand(()) < 0.5) if self.training else 0](images)


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the default network": ({}, {}, {}),
    "recomputed blocks, accumulated gradients": (
        dict(fields=FIELDS, grad_checkpointing=True),
        dict(accumulate_grad_batches=2),
        dict(gradient_as_bucket_view=True),
    ),
    "a network that branches": (
        dict(name="three:Branches", fields=None, drop_path_rate=0.0),
        {},
        dict(find_unused_parameters=True),
    ),
}
"""Settings of the module, of the Trainer and of DDP."""


def train(folder: Path, digits: str, steps: int, settings: tuple[dict[str, Any], ...]) -> None:
    """Train up to a step, from the folder's checkpoint if there is one."""
    of_module, of_trainer, of_ddp = settings
    last = folder / "last.ckpt"
    fit = trainer(
        devices=PROCESSES,
        strategy=DDPStrategy(**of_ddp),
        use_distributed_sampler=False,
        max_steps=steps,
        limit_train_batches=12,
        limit_val_batches=1,
        callbacks=[LastCheckpoint(folder), StepSeed(0), EMA(0.9)],
        plugins=[DurableCheckpointIO()],
        **of_trainer,
    )
    torch.manual_seed(0)
    net = module(
        **dict(num_classes=10, lr=1e-2, schedule="constant", warmup_epochs=0, drop_path_rate=0.2)
        | of_module
    )
    data = images_in(digits, img_size=8, batch_size=12, cutmix=0.0)
    fit.fit(net, datamodule=data, ckpt_path=last if last.exists() else None)
    fit.strategy.barrier()


def process(rank: int, folder: Path, digits: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(PROCESSES)}
    for name, settings in RUNS.items():
        for run, steps in (("whole", 6), ("stopped", 3), ("stopped", 6)):
            train(folder / name / run, digits, steps, settings)


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    start_processes(process, (Path(sys.argv[1]), sys.argv[2]), PROCESSES, start_method="fork")
