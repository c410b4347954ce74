"""FSDP2 beside DDP: the time of a step, the memory of a GPU, and whether both train alike.

    python benchmarks/sharding.py [--model s24] [--img_size 224] [--batch 32] [--steps 30] [--rounds 3] [--out FILE]

Each side runs in processes of its own, on all GPUs, in turns. Without a GPU it runs on one process of the CPU and has
no memory to show. The loss of the last step is printed for both: they draw the same images and start with the same
weights. Needs torch, timm and lightning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bare
import torch
from lightning.pytorch import Callback, Trainer
from report import DEVICE, add
from torch.utils.data import DataLoader

from contrib.fsdp.strategy import FullyShardedStrategy

WARM_UP = 5


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def train(options: argparse.Namespace) -> None:
    """Train by one of the two in this process; process 0 writes what it found."""
    torch.manual_seed(0)
    sharded, clock = options.strategy == "fsdp2", Clock()
    module = bare.Flat(options.model, img_size=options.img_size, drop_path_rate=0.0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(options.batch, 3, options.img_size, options.img_size, generator=generator)
    labels = torch.randint(0, 1000, (options.batch,), generator=generator)
    trainer = bare.trainer(
        devices="auto" if DEVICE == "cuda" else 1,
        strategy=FullyShardedStrategy() if sharded else "ddp",
        max_steps=options.steps,
        callbacks=[clock],
    )
    batches: Any = [(images, labels)] * options.steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
    if trainer.is_global_zero:
        steps = [b - a for a, b in zip(clock.times[WARM_UP:], clock.times[WARM_UP + 1 :], strict=False)]
        memory = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
        assert module.figures is not None
        found = dict(ms=1000 * statistics.median(steps), memory=memory, loss=module.figures[0].item())
        options.result.write_text(json.dumps(found | dict(processes=trainer.world_size)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="s24")
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32, help="images a process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file to add the result to")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < WARM_UP + 3:
        parser.error(f"--steps {options.steps}: {WARM_UP} warm up and a few are timed")
    train(options) if options.strategy else compare(options)


def compare(options: argparse.Namespace) -> None:
    """Train by both in turns, each in processes of its own."""
    found: dict[str, list[dict[str, float]]] = {"ddp": [], "fsdp2": []}
    for _ in range(options.rounds):
        for strategy, results in found.items():
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder, "result.json")
                more = ["--strategy", strategy, "--result", str(result)]
                subprocess.run([sys.executable, *sys.argv, *more], check=True, env=os.environ)
                results.append(json.loads(result.read_text()))
    ratios = [ours["ms"] / ddp["ms"] for ours, ddp in zip(found["fsdp2"], found["ddp"], strict=True)]
    sides = (
        f"{name} {statistics.median(each['ms'] for each in results):.1f} ms a step, {results[0]['memory']:.2f} GB, "
        f"loss {results[0]['loss']:.5f}"
        for name, results in found.items()
    )
    line = (
        f"{options.model} at {options.img_size}, {options.batch} images on each of {found['ddp'][0]['processes']:.0f} "
        f"processes, {options.rounds} rounds: {'; '.join(sides)}; fsdp2/ddp {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(line, flush=True)
    add(options.out, line)


if __name__ == "__main__":
    main()
