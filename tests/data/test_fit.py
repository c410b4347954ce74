"""How an image that is not square becomes square: learned with, saved, and used wherever images are prepared."""

from pathlib import Path

import numpy as np
import pytest
import torch
from modules import FIELDS, trainer
from PIL import Image
from timm.data import create_transform

import cait
from cait.data.datamodule import ImageNetDataModule
from cait.data.transforms import CROP_MODES
from cait.train.module import CaiTModule


@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_a_checkpoint_prepares_images_as_its_training_did(fit: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 64, 3), dtype=np.uint8)
    for number, strip in enumerate(pixels):  # wide images
        path = tmp_path / ("train", "val")[number % 2] / "ab"[number // 6] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(strip).save(path)
    data = ImageNetDataModule(str(tmp_path), img_size=16, batch_size=2, num_workers=0, repeats=1, fit=fit, crop_pct=0.9)
    run = trainer(max_steps=1)
    run.fit(CaiTModule(fields=FIELDS), data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    path, _ = data.val_images.samples[0]
    timms = dict(crop_pct=0.9, interpolation="bicubic")
    expected = create_transform((3, 16, 16), crop_mode=CROP_MODES[fit], **timms)(Image.open(path))
    assert not torch.equal(expected, create_transform((3, 16, 16), **timms)(Image.open(path)))
    (evaluated, _), *_ = data.val_dataloader()
    images, _ = data.on_after_batch_transfer((evaluated, torch.zeros(2)), 0)
    assert torch.equal(images[0], expected)
    assert torch.equal(cait.load(tmp_path / "x.ckpt").transform(path), expected)
