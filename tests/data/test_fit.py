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

PLAIN = dict(auto_augment=None, hflip=0.0, erase_prob=0.0, mixup=0.0, cutmix=0.0, repeats=1)
WHOLE = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0])


@pytest.fixture(scope="module")
def strips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 64 × 16 pixels, 60 to train on and 40 to validate on. A bright mark at an end is their class."""
    root, rng = tmp_path_factory.mktemp("strips"), np.random.default_rng(0)
    for number in range(100):
        split, name = "train" if number < 60 else "val", ("left", "right")[number % 2]
        pixels = rng.integers(0, 100, (16, 64, 3), dtype=np.uint8)
        pixels[:, :10] = 250
        image = Image.fromarray(pixels if name == "left" else pixels[:, ::-1].copy())
        (root / split / name).mkdir(parents=True, exist_ok=True)
        image.save(root / split / name / f"{number:03}.png")
    return root


def learned(root: Path, epochs: int = 8, **settings: object) -> tuple[ImageNetDataModule, float]:
    """The data, and the accuracy of a small network after a few epochs."""
    torch.manual_seed(0)
    given: dict = PLAIN | dict(img_size=16, batch_size=10, num_workers=0) | settings
    data = ImageNetDataModule(root=str(root), **given)
    net = CaiTModule(fields=FIELDS, lr=5e-3, lr_base_size=None, warmup_epochs=1, drop_path_rate=0.0)
    (fit := trainer(max_epochs=epochs)).fit(net, data)
    fit.save_checkpoint(root / f"{data.preprocessing.fit}.ckpt")
    return data, fit.callback_metrics["val/acc1"].item()


def test_what_lies_at_the_edge_is_learned_with_pad_and_not_with_crop(strips: Path) -> None:
    assert learned(strips, fit="crop")[1] < 70
    assert learned(strips, fit="pad", **WHOLE)[1] >= 95


@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_a_checkpoint_prepares_images_as_its_training_did(fit: str, strips: Path) -> None:
    data, _ = learned(strips, epochs=1, fit=fit, crop_pct=0.9)
    path, _ = data.val_images.samples[0]
    timms = create_transform((3, 16, 16), crop_pct=0.9, interpolation="bicubic", crop_mode=CROP_MODES[fit])
    expected = timms(Image.open(path))
    assert not torch.equal(
        expected, create_transform((3, 16, 16), crop_pct=0.9, interpolation="bicubic")(Image.open(path))
    )
    (evaluated, _), *_ = data.val_dataloader()
    images, _ = data.on_after_batch_transfer((evaluated, torch.zeros(10)), 0)
    assert torch.equal(images[0], expected)

    checkpoint = strips / f"{fit}.ckpt"
    assert torch.equal(cait.load(checkpoint).transform(path), expected)
