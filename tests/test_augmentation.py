"""Training and evaluation transforms: the same pixels as timm's, and drawn from the same distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import REPO
from PIL import Image
from scipy.stats import chi2_contingency, ks_2samp
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, RandAugment, rand_augment_transform
from timm.data.transforms import RandomResizedCropAndInterpolation

from cait.data.dataset import TrainPictures, mix_seeds
from cait.data.folder import load_rgb
from cait.datamodule import ImageNetDataModule
from cait.errors import UserError

SIZE = 48
RECIPE = dict(auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)


def module(root: Path, **settings: object) -> ImageNetDataModule:
    defaults: dict = dict(img_size=SIZE, batch_size=4, num_workers=0)
    return ImageNetDataModule(root=str(root), **(defaults | settings))


def train_pictures(root: Path, **settings: object) -> TrainPictures:
    data = module(root, **settings)
    data.setup("fit")
    return data.train_pictures


KEYS = [(0, index, repeat) for index in range(0, 36, 3) for repeat in range(2)]


# Settings of ours beside what they are called in timm, where they are left out they are the recipe's.
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, RECIPE),
        (dict(auto_augment="3a"), RECIPE | dict(auto_augment="3a")),
        (dict(auto_augment="3a", color_jitter=0.3), RECIPE | dict(auto_augment="3a", color_jitter=0.3)),
        (dict(auto_augment=None), dict(re_prob=0.25)),
        (dict(auto_augment=None, color_jitter=0.4), dict(re_prob=0.25, color_jitter=0.4)),
        (
            dict(auto_augment=None, color_jitter=[0.4, 0.2, 0.1, 0.5]),
            dict(re_prob=0.25, color_jitter=(0.4, 0.2, 0.1, 0.5)),
        ),
        (dict(auto_augment="original-mstd0.5"), RECIPE | dict(auto_augment="original-mstd0.5")),
        (dict(auto_augment="augmix-m5-w4"), RECIPE | dict(auto_augment="augmix-m5-w4")),
        (dict(erase_prob=1.0), RECIPE | dict(re_prob=1.0)),
        (dict(interpolation="bilinear"), RECIPE | dict(interpolation="bilinear")),
        (dict(scale=[0.5, 0.6], ratio=[1.0, 2.0]), RECIPE | dict(scale=(0.5, 0.6), ratio=(1.0, 2.0))),
        (dict(hflip=1.0), RECIPE | dict(hflip=1.0)),
        (dict(mean=[0.5, 0.4, 0.3], std=[0.1, 0.2, 0.3]), RECIPE | dict(mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))),
    ],
)
def test_training_pixels_are_timms(mixed_root: Path, settings: dict, theirs: dict) -> None:
    ours = train_pictures(mixed_root, **settings)
    plain = train_pictures(mixed_root)
    common: dict = dict(input_size=SIZE, is_training=True, interpolation="bicubic", re_mode="pixel", color_jitter=None)
    reference = TrainPictures(ours.samples, create_transform(**(common | theirs)), seed=0, faults=ours.faults)
    for key in KEYS:
        assert torch.equal(ours[key][0], reference[key][0])
    if settings:  # else this would show nothing
        assert any(not torch.equal(ours[key][0], plain[key][0]) for key in KEYS)


def test_colour_jitter_is_left_out_beside_randaugment_aloud(mixed_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ours, plain = train_pictures(mixed_root, color_jitter=0.4), train_pictures(mixed_root)
    assert all(torch.equal(ours[key][0], plain[key][0]) for key in KEYS)
    (line,) = [record.message for record in caplog.records if "color_jitter" in record.message]
    assert line == "color_jitter 0.4 is left out beside auto_augment rand-m9-mstd0.5-inc1, as in timm"


@pytest.mark.parametrize("img_size", [32, 50, 96])
@pytest.mark.parametrize("crop_pct", [1.0, 0.95, 0.875, 0.5])
def test_evaluation_pixels_are_timms(mixed_root: Path, img_size: int, crop_pct: float) -> None:
    data = module(mixed_root, img_size=img_size, crop_pct=crop_pct)
    data.setup("validate")
    theirs = create_transform(img_size, interpolation="bicubic", crop_pct=crop_pct)
    for index, (path, _) in enumerate(data.val_pictures.samples):
        assert torch.equal(data.val_pictures[index][0], theirs(load_rgb(path)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(scale=[0.9, 0.1]), r"scale must be two shares .*got \[0.9, 0.1\]"),
        (dict(scale=[0.0, 1.0]), "scale must be"),
        (dict(scale=[0.5, 1.5]), "scale must be"),
        (dict(ratio=[0.0, 1.0]), "ratio must be"),
        (dict(ratio=[2.0, 1.0]), "ratio must be"),
        (dict(color_jitter=-0.1), "color_jitter must be a number of at least 0.*got -0.1"),
        (dict(color_jitter=-0.1, auto_augment="3a"), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2]), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2, -0.3]), "color_jitter must be"),
        (dict(color_jitter=[0.1, 0.2, 0.3, 0.6]), "color_jitter must be"),
        (dict(erase_prob=1.1), "erase_prob must be"),
        (dict(auto_augment="4a"), "auto_augment '4a'"),
        (dict(auto_augment="rand-q9"), "auto_augment 'rand-q9'"),
        (dict(mix_mode="pairs"), "mix_mode must be one of batch, pair, elem, got 'pairs'"),
        (dict(cutmix=-1.0), "mixup and cutmix must be at least 0"),
        (dict(mix_prob=1.5), "mix_prob must be"),
        (dict(mix_switch_prob=-0.5), "mix_switch_prob must be"),
    ],
)
def test_settings_out_of_range_are_told_in_one_line(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        module(tmp_path, **settings)
    assert "\n" not in str(caught.value)
