"""What training images take as whole files, smaller files and raw pixels in shards, and how they differ.

    python benchmarks/stored.py [--files 1280] [--out FILE]

The images are those of input.py, which measures the time. The difference is the mean of all pixels', in levels of 255,
from the same crop of the original file: of whole images at 224, and of RandomResizedCrop's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from input import SIZE, prepare
from PIL import Image
from report import add
from torchvision.transforms import RandomResizedCrop

from cait.cli import main as cait_main
from cait.data.source import open_source

OPTIONS = {
    "whole files": [],
    "--max_side 400": ["--max_side=400"],
    "--raw --max_side 400": ["--raw", "--max_side=400"],
    "--raw": ["--raw"],
}


def difference(ours: Any, theirs: Any, whole: bool) -> float:
    """Of 100 images; a crop is the same part of both."""
    found = []
    for index in range(100):
        pair = [Image.open(samples[index][0]).convert("RGB") for samples in (ours, theirs)]
        left, top, width, height = 0.0, 0.0, 1.0, 1.0
        if not whole:
            torch.manual_seed(index)
            at = RandomResizedCrop.get_params(torch.empty(pair[1].height, pair[1].width), [0.08, 1.0], [3 / 4, 4 / 3])
            top, left, height, width = (side / pair[1].size[1 - place % 2] for place, side in enumerate(at))
        pixels = []
        for image in pair:
            box = (left * image.width, top * image.height, (left + width) * image.width, (top + height) * image.height)
            pixels.append(np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box), float))
        found.append(abs(pixels[0] - pixels[1]).mean())
    return statistics.mean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1280)
    parser.add_argument("--out", type=Path, help="Markdown file to which lines are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder / "folder", given.files, given.files)
        original = open_source(str(folder / "folder")).train
        for name, options in OPTIONS.items():
            cait_main(["shards", str(folder / "folder"), str(folder / name), "--images=64", *options])
            size = sum(path.stat().st_size for path in (folder / name).glob("train/*"))
            samples = open_source(str(folder / name)).train
            whole, crops = (difference(samples, original, whole) for whole in (True, False))
            took = f"{given.files:,} images take {size / 1e6:.1f} MB, {size / given.files / 1e3:.0f} KB each"
            line = f"{name}: {took}; difference {whole:.2f} of whole images, {crops:.2f} of crops"
            print(line, flush=True)
            add(given.out, line)


if __name__ == "__main__":
    main()
