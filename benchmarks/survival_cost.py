"""What a step pays for surviving: seeds for every step, the guard against infinities, the watch for signals, saving.

    python benchmarks/survival_cost.py [--model xxs24] [--batch 8] [--steps 12] [--pairs 5] [--out FILE]

Lightning's Trainer with none of these and with all of them take turns on the same network and
batch; compared are the medians of the steps' times within each pair. A checkpoint is written once
in 500 steps, so a 500th of its time is added.
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
from lightning.pytorch import Callback, LightningModule, Trainer
from report import stamp
from torch.utils.data import DataLoader, TensorDataset

from cait.callbacks.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.callbacks.guard import NonFiniteGuard
from cait.callbacks.seeding import StepSeed
from cait.module import CaiTModule

SAVE_EVERY = 500


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def steps(self) -> list[float]:
        """Seconds of each step but the first two."""
        return [end - begin for begin, end in zip(self.times[2:], self.times[3:], strict=False)]


def run(name: str, batch: int, steps: int, survives: bool, folder: Path) -> tuple[float, float]:
    """(median seconds of a step, seconds of a save)"""
    torch.manual_seed(0)
    module = CaiTModule(name, warmup_epochs=0)
    # One batch over and over, without workers: the loader is not what is measured.
    data = TensorDataset(torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,)))
    loader = DataLoader(data, batch_size=batch)
    clock, last = Clock(), LastCheckpoint(folder, SAVE_EVERY)
    # The clock first, so that a step's time runs from hook to hook with all that lies between.
    callbacks: list[Callback] = [clock, StepSeed(0), NonFiniteGuard(folder, 10), last] if survives else [clock]
    trainer = Trainer(
        max_epochs=steps,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=survives,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=[DurableCheckpointIO()] if survives else [],
    )
    if survives:
        last.on_train_epoch_end = lambda *args: None  # an epoch is one batch here
    trainer.fit(module, loader)
    begin = time.perf_counter()
    if survives:
        last.save(trainer)
    return statistics.median(clock.steps()), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="xxs24")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    ratios, saves = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            order = (False, True) if pair % 2 else (True, False)
            times = {mode: run(options.model, options.batch, options.steps, mode, Path(folder)) for mode in order}
            (plain, _), (guarded, save) = times[False], times[True]
            ratios.append(guarded / plain)
            saves.append(save / SAVE_EVERY / plain)
            print(f"plain {plain * 1e3:.1f} ms, surviving {guarded * 1e3:.1f} ms: {ratios[-1]:.4f}", flush=True)
    ratio = statistics.median(ratios) + statistics.median(saves)
    verdict = (
        f"{options.model}@224, batch {options.batch}, bf16: a step takes {ratio:.4f} of the plain loop's time "
        f"({options.pairs} pairs: {min(ratios):.4f} to {max(ratios):.4f}; saving adds {statistics.median(saves):.4f})"
    )
    print(verdict)
    if options.out:
        with options.out.open("a") as file:
            file.write(f"- {stamp()}: {verdict}\n")


if __name__ == "__main__":
    main()
