"""What `--monitor.every_n_steps 50` costs.

    python benchmarks/monitor.py [--model xxs24 | --digits] [--batch 8] [--steps 80] [--out FILE]

One run watches every fourth step. Of each four steps, two are plain, the third keeps its gradients, the fourth is
measured. What the last two take beyond the first two is the cost of watching once, and a 50th of it that of a step.
On the CPU the time is that of the process's own threads, so that what else the machine does counts less.
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

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from report import DIGITS, add
from torch.utils.data import DataLoader

from cait.train.module import CaiTModule
from contrib.monitor.callback import Monitor

EVERY = 50


class Clock(Callback):
    """Seconds that each step begins at, in front of the monitor, or ends at, behind it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


class Begin(Clock):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(now())


class End(Clock):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seconds.append(now())


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def run(name: str, batch: int, steps: int, digits: bool, folder: str) -> list[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    size = 16 if digits else 224
    fields = DIGITS if digits else {}
    module = CaiTModule(name, size, 1000, warmup_epochs=0, lr_base_size=None, fields=fields)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    begin, end = Begin(), End()
    trainer = Trainer(
        max_epochs=1,
        accelerator="auto",
        devices=1,
        default_root_dir=folder,
        logger=TensorBoardLogger(folder),
        log_every_n_steps=EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[begin, Monitor(4), end],
    )
    # One batch over and over, without workers: the loader is not what is measured.
    trainer.fit(module, DataLoader([(images, labels)] * steps, batch_size=None))
    return [after - before for before, after in zip(begin.seconds, end.seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="xxs24")
    parser.add_argument("--digits", action="store_true", help="the network and the size of configs/digits.yaml")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        seconds = run(options.model, options.batch, options.steps, options.digits, folder)
    fours = [seconds[i : i + 4] for i in range(4, len(seconds) - 3, 4)]  # the first warm up
    costs = [2 * (keeps + measured) / (one + two) - 2 for one, two, keeps, measured in fours]
    low, middle, high = (100 * cost / EVERY for cost in statistics.quantiles(costs, n=4))
    what = "the digits' network" if options.digits else f"{options.model}@224"
    verdict = (
        f"{what}, batch {options.batch}: every {EVERY} steps the monitor takes {middle:.2f} % of the run's time "
        f"(median of {len(costs)}, quartiles {low:.2f} and {high:.2f})"
    )
    print(verdict)
    add(options.out, verdict)


if __name__ == "__main__":
    main()
