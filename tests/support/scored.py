"""A run on digits that are laid out as ImageNet and its further sets, and its logits without a loader."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import SMALL
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform
from torch import Tensor

NAMES = [f"n{index:02d}" for index in range(12)]
BROKEN = "ILSVRC2012_val_00000005.JPEG"
"""The validation picture that cannot be read."""
PART = (2, 5, 11)
"""The classes of a set that lacks the others."""
# the tests' own process could not start others
CPU = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
]
TWO = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.strategy=ddp",
    "--data.batch_size=13",
]
"""Two processes, in batches that the pictures do not fill, and that Mixup could not pair."""


def write_sets(place: Path) -> None:
    """The digits in ten classes, and 0 and 1 in negative in two more.

    Below `place`, data/ has 301 validation pictures, one of them unreadable, and real.json their labels by ReaL.
    Further sets: v2/ by the classes' indices, named/ by their names, part/ of some classes by their names.
    """
    digits = load_digits()
    pictures = [
        (digit, pixels * 255 / 16)
        for digit, pixels in zip(digits.target, digits.images, strict=True)
    ]
    pictures += [(digit + 10, 255 - pixels) for digit, pixels in pictures if digit < 2]
    order = np.random.default_rng(0).permutation(len(pictures))  # numbers do not follow the classes
    real: list[list[int]] = []
    for index, picture in enumerate(order):
        label, pixels = pictures[picture]
        number = index + 1
        if index < 301:  # over two processes 151 and 150
            path = place / "data" / "val" / NAMES[label] / f"ILSVRC2012_val_{number:08d}.JPEG"
            real.append([[], [int(label)], [int(label), (int(label) + 3) % 12]][number % 3])
        elif index < 500:
            path = place / "v2" / str(label) / f"{number}.jpeg"
        else:
            path = place / "data" / "train" / NAMES[label] / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.round().astype(np.uint8)).save(path, format="JPEG", quality=95)
        if path.name == BROKEN:
            path.write_bytes(b"no picture")
            real[-1] = []  # timm's evaluator knows of none
    (place / "real.json").write_text(json.dumps(real))
    (place / "named").mkdir()
    for index in range(12):
        (place / "named" / NAMES[index]).symlink_to(place / "v2" / str(index))
    (place / "part").mkdir()
    for index in PART:
        (place / "part" / NAMES[index]).symlink_to(place / "v2" / str(index))


def train(place: Path) -> None:
    """The run logs/mine on these pictures, with a moving average."""
    from cait.cli import main

    run = [
        *SMALL,
        *CPU,
        "--data.root=data",
        "--data.num_workers=0",
        "--trainer.max_epochs=2",
        "--run_name=mine",
    ]
    run += ["--trainer.limit_val_batches=9"]  # which evaluation does not heed
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["cait"])
        patch.setenv("CAIT_RUN", "")
        main(
            [
                "fit",
                *run,
                "--ema.decay=0.9",
                "--data.mixup=0",
                "--data.cutmix=0",
                "--data.eval_batch_size=32",
            ]
        )


def logits_of(place: Path, weights: str, paths: list[Path], mirrored: bool = False) -> Tensor:
    """[len(paths), 12], a picture at a time, without a loader."""
    from cait.data.reading import load_image
    from cait.model.weights import load_weights
    from cait.train.module import CaiTModule

    checkpoint = place / "logs/mine/checkpoints/best.ckpt"
    model = CaiTModule.load_from_checkpoint(checkpoint, map_location="cpu").model.eval()
    load_weights(model, checkpoint, ema=weights == "ema")
    transform = create_transform(16, interpolation="bicubic", crop_pct=1.0)
    with torch.no_grad():
        images = (transform(load_image(str(path)))[None] for path in paths)
        return torch.cat([model(image.flip(-1) if mirrored else image) for image in images])


def validation(place: Path) -> tuple[list[Path], Tensor]:
    """The images that can be read, and their labels."""
    paths = [path for path in sorted((place / "data/val").glob("*/*")) if path.name != BROKEN]
    return paths, torch.tensor([int(path.parent.name.removeprefix("n")) for path in paths])
