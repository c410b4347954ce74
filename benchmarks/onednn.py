"""How much faster float32 is with oneDNN than with MKL on an AMD processor: `cait.run.cpu.fast_matmul`.

    python benchmarks/onednn.py [--rounds 20] [--out benchmarks/onednn.md]

A training step (forward and backward) and a forward pass, alternately with MKL, PyTorch's choice, and with oneDNN.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cait` sets it

import torch
from report import DIGITS, add, stamp
from torch.nn.functional import cross_entropy

import cait
from cait.run.cpu import fast_matmul

CPU = torch.device("cpu")
WIDE = SimpleNamespace(pos_embed=torch.empty(1, 1, 64))
"""Stands for any network: narrow ones are measured with oneDNN too."""
CLASSES = 10
WARM_UP = 4
"""Rounds that are not counted: oneDNN compiles a kernel for each shape, and memory is taken."""
WIDTHS = (32, 48, 64, 96, 128)
CASES = [
    *((f"the digits' network, {width} wide, one thread", 16, 32, 1, DIGITS | {"embed_dim": width}) for width in WIDTHS),
    ("XXS-24", 64, 16, 0, {}),
    ("XXS-24", 224, 4, 0, {}),
]
"""What it is called, pixels, images in a batch, threads (0: PyTorch's choice), fields."""


def compare(work: Callable[[], object], rounds: int) -> str:
    found: dict[str, list[float]] = {"mkl": [], "onednn": []}
    for round_ in range(-WARM_UP, rounds):
        for side, taken in found.items():
            with fast_matmul(WIDE, CPU) if side == "onednn" else nullcontext():
                start = time.perf_counter()
                work()
                end = time.perf_counter()
            if round_ >= 0:
                taken.append(end - start)
    ratio = statistics.median(mkl / onednn for mkl, onednn in zip(*found.values(), strict=True))
    mkl, onednn = (1e3 * statistics.median(taken) for taken in found.values())
    return f"{mkl:.0f} ms, {onednn:.0f} ms with oneDNN, {ratio:.2f} times the speed"


def measure(size: int, batch: int, fields: dict[str, int], rounds: int) -> dict[str, str]:
    model = cait.create_model("xxs24", img_size=size, num_classes=CLASSES, **fields)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, CLASSES, (batch,))

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
    with fast_matmul(WIDE, CPU):
        if torch.backends.mkldnn.matmul.fp32_precision == "none":
            parser.error("`cait` keeps to MKL on this processor")
    threads = torch.get_num_threads()
    for name, size, batch, given, fields in CASES:
        torch.set_num_threads(given or threads)
        for what, result in measure(size, batch, fields, options.rounds).items():
            line = f"{name}, {size} pixels, {batch} images: {what} {result}"
            print(f"{stamp()}: {line}", flush=True)
            add(options.out, line)


if __name__ == "__main__":
    main()
