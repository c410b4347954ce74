"""What it brings on an AMD processor that oneDNN multiplies float32 matrices: `cait.cpu.fast_matmul`.

    python benchmarks/onednn.py [--rounds 20] [--out benchmarks/onednn.md]

A training step (forward and backward) and a forward pass in float32, with PyTorch's own choice and with oneDNN in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cait` sets it

import torch
from report import add, stamp
from torch.nn.functional import cross_entropy

import cait
from cait.cpu import fast_matmul

WARM_UP = 4
"""Rounds that are not counted: oneDNN writes code for each shape, and memory is taken."""
WIDTHS = (32, 48, 64, 96, 128)
DIGITS = dict(depth=6, num_heads=2, patch_size=4)
"""The network of configs/digits.yaml, which is 96 wide."""
CASES = [
    *((f"the digits' network, {width} wide, one thread", 16, 32, 1, DIGITS | {"embed_dim": width}) for width in WIDTHS),
    ("XXS-24", 64, 16, 0, {}),
    ("XXS-24", 224, 4, 0, {}),
]
"""What it is called, pixels, images in a batch, threads (0: PyTorch's choice), fields."""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(work: Callable[[], object], rounds: int) -> str:
    cpu = torch.device("cpu")
    found: dict[str, list[float]] = {"own": [], "onednn": []}
    for round_ in range(-WARM_UP, rounds):
        for side, taken in found.items():
            with fast_matmul(cpu) if side == "onednn" else nullcontext():
                time_ = seconds(work)
            if round_ >= 0:
                taken.append(time_)
    ratio = statistics.median(own / onednn for own, onednn in zip(*found.values(), strict=True))
    own, onednn = (1e3 * statistics.median(taken) for taken in found.values())
    return f"{own:.0f} ms, {onednn:.0f} ms with oneDNN, {ratio:.2f} times the speed"


def measure(size: int, batch: int, fields: dict[str, int], rounds: int) -> dict[str, str]:
    model = cait.create_model("xxs24", img_size=size, **fields)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))

    def step() -> None:
        model.train().zero_grad()
        cross_entropy(model(images), labels).backward()

    def forward() -> None:
        with torch.inference_mode():
            model.eval()(images)

    return {"a step": compare(step, rounds), "a forward pass": compare(forward, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="Markdown file to add the results to")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    for name, size, batch, given, fields in CASES:
        torch.set_num_threads(given or threads)
        for what, result in measure(size, batch, fields, options.rounds).items():
            line = f"{name}, {size} pixels, {batch} images: {what} {result}"
            print(f"{stamp()}: {line}", flush=True)
            add(options.out, line)


if __name__ == "__main__":
    main()
