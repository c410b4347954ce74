"""What a checkpoint costs the steps around it, waited for and written in the background.

    python benchmarks/saving.py [--models xxs24 s24 m48] [--img_size 64] [--batch 2] [--rounds 3] [--out FILE]

One run of Lightning's Trainer, with AdamW and a moving average. It is divided into rounds of the same number of steps,
which begin with a save that is waited for, with one in the background, and with none, in turns. A round is as long
as the background's writing takes, so that the steps beside it are in it. Compared are neighbouring rounds.
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
from lightning.pytorch import Callback, Trainer
from report import add
from torch.utils.data import DataLoader

from cait.extras.background.checkpoint_io import BackgroundCheckpointIO
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.ema import EMA

WARM_UP = 3
KINDS: dict[str, type[DurableCheckpointIO] | None] = {
    "none": None,
    "waited for": DurableCheckpointIO,
    "background": BackgroundCheckpointIO,
}


class Rounds(Callback):
    """Time rounds of steps that begin with a save of one kind after the other."""

    def __init__(self, last: LastCheckpoint, rounds: int) -> None:
        self.last, self.order = last, ["background", *list(KINDS) * rounds]  # the first allocates its memory
        self.steps: list[float] = []
        self.results: list[tuple[str, float, float]] = []  # kind, seconds of the save and of the round
        self.round_steps = 0
        self._io = {name: kind() for name, kind in KINDS.items() if kind}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.steps.append(time.perf_counter())
        if len(self.steps) < WARM_UP:
            return
        if len(self.steps) == WARM_UP:
            self._first(trainer)
        if self._left == 0:
            self.results.append((self.kind, self._save, time.perf_counter() - self._begin))
            if not self.order:
                trainer.should_stop = True
                return
            self._next(trainer)
        self._left -= 1

    def _first(self, trainer: Trainer) -> None:
        step = statistics.median(b - a for a, b in zip(self.steps, self.steps[1:], strict=False))
        trainer.strategy.checkpoint_io = self._io["waited for"]
        begin = time.perf_counter()
        self.last.save(trainer)
        self.round_steps = max(2, round(1.5 * (time.perf_counter() - begin) / step))
        self._next(trainer)

    def _next(self, trainer: Trainer) -> None:
        for io in self._io.values():
            io.finish()
        self.kind, self._left = self.order.pop(0), self.round_steps
        self._begin = time.perf_counter()
        if self.kind != "none":
            trainer.strategy.checkpoint_io = self._io[self.kind]
            self.last.save(trainer)
        self._save = time.perf_counter() - self._begin


def measure(name: str, img_size: int, batch: int, rounds: int, folder: Path) -> str:
    torch.manual_seed(0)
    module = bare.Flat(name, img_size=img_size)
    images, labels = torch.randn(batch, 3, img_size, img_size), torch.randint(0, 1000, (batch,))
    last = LastCheckpoint(folder, every_n_steps=10**9)
    timed = Rounds(last, rounds)
    trainer = bare.trainer(max_steps=10**6, callbacks=[EMA(0.999), timed])
    trainer.fit(module, DataLoader([(images, labels)] * 10**6, batch_size=None))
    size = (folder / "last.ckpt").stat().st_size / 1e9
    found = timed.results[1:]
    lines = []
    for kind in ("waited for", "background"):
        save = statistics.median(seconds for name_, seconds, _ in found if name_ == kind)
        of_kind = [whole for name_, _, whole in found if name_ == kind]
        of_none = [whole for name_, _, whole in found if name_ == "none"]
        cost = statistics.median(ours - plain for ours, plain in zip(of_kind, of_none, strict=True))
        lines.append(f"{kind}: {save * 1e3:,.0f} ms in the save, {cost * 1e3:,.0f} ms in all")
    step = statistics.median(b - a for a, b in zip(timed.steps, timed.steps[1:], strict=False))
    return f"{name}, {size:.2f} GB, steps of {step * 1e3:,.0f} ms, {rounds} rounds: " + "; ".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["xxs24", "s24", "m48"])
    parser.add_argument("--img_size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            line = measure(name, options.img_size, options.batch, options.rounds, Path(folder))
        print(line, flush=True)
        add(options.out, line)


if __name__ == "__main__":
    main()
