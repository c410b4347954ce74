"""What `auto` takes for the ten models at 224 and 384 pixels on this device: a line each, in under four minutes.

    python benchmarks/attention_choice.py [--models xxs24 ...] [--sizes 224 384] [--batch 128] [--dtype bfloat16]
        [--compile | --blocks] [--out FILE.md]

It is what a run measures before its first step (src/cait/extras/fused/measure.py). Models of the same heads and tokens
are measured once. At 384 pixels a batch has a quarter of the images. With --blocks it says what `--model.compile auto`
takes instead; that compiles a block of each model, which takes half a minute.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch
from report import DEVICE, add, stamp

from cait import create_model
from cait.extras.fused import block
from cait.extras.fused.block import BlockCase
from cait.extras.fused.measure import Case, Measured, measure, shapes
from cait.model.config import VARIANTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 384], help="pixels")
    parser.add_argument("--batch", type=int, default=128, help="images at 224 pixels")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--compile", action="store_true", help="as under --model.compile true")
    parser.add_argument("--blocks", action="store_true", help="time blocks, compiled and plain")
    parser.add_argument("--out", type=Path, help="Markdown file to add the lines to")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    mixed = functools.partial(torch.autocast, DEVICE, dtype, enabled=dtype != torch.float32)
    find, begin = functools.cache(measure), time.perf_counter()
    print(stamp())
    for size in options.sizes:
        for name in options.models:
            with torch.device("meta"):
                network = create_model(name, size)
            images = max(1, options.batch // (1 if size <= 224 else 4))
            if options.blocks:
                case = BlockCase(network.config, torch.device(DEVICE), images, torch.float32, dtype, mixed)
                report(options.out, f"{name} at {size}, {images} images: compile {block.measure(case)}")
                continue
            for shape in shapes(network, DEVICE, dtype):
                found: Measured = find(Case(shape, images, options.compile, context=mixed))
                heads = f"{images} images of {shape.N} tokens, {shape.heads} heads"
                report(options.out, f"{name} at {size}, {heads}: attention {found}")
    print(f"{time.perf_counter() - begin:.0f} s")


def report(out: Path | None, line: str) -> None:
    print(line, flush=True)
    add(out, line)


if __name__ == "__main__":
    main()
