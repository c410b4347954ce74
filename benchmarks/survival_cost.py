"""What a step pays for surviving: seeds for every step, the guard against infinities, the watch for signals, saving.

    python benchmarks/survival_cost.py [--model xxs24] [--batch 8] [--steps 60] [--out FILE]

In one run of Lightning's Trainer these take part in every other step; compared are neighbouring
steps, so that what else the machine does falls on both. A checkpoint is taken to be written once in
500 steps, so a 500th of its time is added.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import bare
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from report import add
from torch.utils.data import DataLoader

from cait.guards.nonfinite import NonFiniteGuard
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.module import CaiTModule
from cait.train.step_seed import StepSeed

SAVE_EVERY = 500


class EveryOtherStep(Callback):
    """Has the callbacks take part in every second step, and takes the time of all."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks
        self.seconds: list[float] = []

    def _pass_on(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step % 2 == 0 or hook == "on_train_start":
            for callback in self.callbacks:
                getattr(callback, hook)(trainer, *arguments)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass_on("on_train_start", trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        self.surviving = trainer.global_step % 2 == 0
        self._begin = now(trainer)
        self._pass_on("on_train_batch_start", trainer, *arguments)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        optimizer.found_inf = None
        self._pass_on("on_before_optimizer_step", trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if self.surviving:
            for callback in self.callbacks:
                callback.on_train_batch_end(trainer, *arguments)
        self.seconds.append(now(trainer) - self._begin)


def now(trainer: Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run(name: str, batch: int, steps: int, folder: Path) -> tuple[list[float], float]:
    """(seconds of each step, surviving and plain in turns; seconds of a save)"""
    torch.manual_seed(0)
    module = CaiTModule(name, warmup_epochs=0, lr_base_size=None)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    last = LastCheckpoint(folder, SAVE_EVERY)
    both = EveryOtherStep([StepSeed(0), NonFiniteGuard(folder, 10), last])
    trainer = bare.trainer(max_epochs=1, callbacks=[both], plugins=[DurableCheckpointIO()])
    # One batch over and over, without workers: the loader is not what is measured.
    trainer.fit(module, DataLoader([(images, labels)] * steps, batch_size=None))
    begin = time.perf_counter()
    last.save(trainer)
    return both.seconds, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="xxs24")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        seconds, save = run(options.model, options.batch, options.steps, Path(folder))
    pairs = list(zip(seconds[4::2], seconds[5::2], strict=False))
    ratios = sorted(surviving / plain for surviving, plain in pairs)
    saving = save / SAVE_EVERY / statistics.median(plain for _, plain in pairs)
    quarters = statistics.quantiles(ratios, n=4)
    verdict = (
        f"{options.model}@224, batch {options.batch}, bf16: steps take {quarters[1] + saving:.4f} of the plain loop's "
        f"time ({len(ratios)} pairs, quartiles {quarters[0]:.4f} and {quarters[2]:.4f}; saving adds {saving:.4f})"
    )
    print(verdict)
    add(options.out, verdict)


if __name__ == "__main__":
    main()
