"""Time a training step with frozen blocks beside one of the whole network: python -m cait.extras.freeze.cost"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cait.extras.freeze import parts
from cait.model import network
from cait.train.optim import OptimizerSettings

CASES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("xxs24", {}, 12),
    ("timm/vit_tiny_patch16_224", {"patch_size": 8}, 6),
    ("timm/resnet18", {}, 2),
)
"""Networks, their fields, and how many blocks or stages a case freezes."""


def step(
    name: str, fields: dict[str, Any], freeze: bool | int, images: int, size: int
) -> tuple[Callable[[], Any], int]:
    """A training step with AdamW on random images, and the values that its optimizer keeps."""
    torch.manual_seed(0)
    built = network.build(name, size, 10, **fields).train()
    if freeze:
        parts.freeze(built, name, freeze)
        for part in parts.frozen_parts(built, freeze is True):
            part.eval()
    optimizer = OptimizerSettings().build(built, 1e-3)
    pixels, labels = torch.randn(images, 3, size, size), torch.randint(10, (images,))

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(built(pixels), labels).backward()
        optimizer.step()

    run()
    moments = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)
    return run, moments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=16, help="images of a step; default 16")
    parser.add_argument("--size", type=int, default=64, help="their side in pixels; default 64")
    parser.add_argument("--repeats", type=int, default=9, help="steps of each kind; their median counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | freeze | ms a step | of a full step | moments, 10⁶ |\n|---|---|---|---|---|")
    for name, fields, blocks in CASES:
        kinds: dict[Any, Any] = {
            freeze: step(name, fields, freeze, given.images, given.size) for freeze in (False, blocks, True)
        }
        times: dict[Any, list[float]] = {freeze: [] for freeze in kinds}
        for _ in range(given.repeats):  # in turn, so that other work on the machine meets all kinds alike
            for freeze, (run, _) in kinds.items():
                begin = time.process_time()
                run()
                times[freeze].append(time.process_time() - begin)
        medians = {freeze: 1000 * statistics.median(found) for freeze, found in times.items()}
        for freeze, milliseconds in medians.items():
            share, moments = milliseconds / medians[False], kinds[freeze][1] / 1e6
            print(f"| {name} | {str(freeze).lower()} | {milliseconds:.0f} | {share:.2f} | {moments:.2f} |")


if __name__ == "__main__":
    main()
