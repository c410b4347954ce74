"""What training images cost as whole files, smaller files and raw pixels in shards: space, difference, processor time.

    python benchmarks/stored.py [--files 1280] [--rounds N] [--out FILE]

The images are those of input.py. The difference is the mean of all pixels', in levels of 255, from the same crop of the
original file: of whole images at 224, and of RandomResizedCrop's. With `--rounds` one thread also makes training images
with crop and flip alone, from files in memory; the sides take turns, reported are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from input import SIZE, one_by_one, prepare, race
from PIL import Image
from report import add
from torchvision.transforms import RandomResizedCrop

from cait.cli import main as cait_main
from cait.data.datamodule import ImageNetDataModule
from cait.data.sampler import Key
from cait.data.source import open_source

A_TURN = 128
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


def training(root: Path) -> Any:
    data = ImageNetDataModule(str(root), num_workers=0, repeats=1, auto_augment=None, erase_prob=0.0)
    data.announces = False
    data.setup("fit")
    return data.train_images


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Markdown file to which lines are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder / "folder", given.files, given.files)
        original = open_source(str(folder / "folder")).train
        roots = {"the folder": folder / "folder"} | {name: folder / name for name in OPTIONS}

        def tell(line: str) -> None:
            print(line, flush=True)
            add(given.out, line)

        for name, options in OPTIONS.items():
            cait_main(["shards", str(folder / "folder"), str(roots[name]), "--images=64", *options])
            size = sum(path.stat().st_size for path in roots[name].glob("train/*"))
            samples = open_source(str(roots[name])).train
            whole, crops = (difference(samples, original, whole) for whole in (True, False))
            took = f"{given.files:,} images take {size / 1e6:.1f} MB, {size / given.files / 1e3:.0f} KB each"
            tell(f"{name}: {took}; difference {whole:.2f} of whole images, {crops:.2f} of crops")
        if given.rounds:

            def keys(turn: int) -> list[Key]:
                return [(turn, index, 0) for index in random.Random(turn).sample(range(given.files), A_TURN)]

            sets = {name: training(root) for name, root in roots.items()}
            for images in sets.values():  # into memory
                images.__getitems__([(0, index, 0) for index in range(given.files)])
            sides = {name: one_by_one(images.__getitem__, keys) for name, images in sets.items()}
            for row in race(sides, given.rounds):
                tell(f"{row['side']}: {1e3 * row['seconds']:.2f} ms of processor time an image, {row['ratio']:.2f}×")


if __name__ == "__main__":
    main()
