"""Training and evaluation transforms: the same pixels as timm's, in color and in gray, or nearly the same faster."""

import importlib

import numpy as np
import pytest
import torch
from harness import over_table
from modules import images_in
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torchvision import transforms

from cait import seeds
from cait.data.dataset import seed_generators
from cait.data.reading import load_image
from cait.data.transforms import GREY, Preprocessing, ShapedCrop

SIZE = 48
RECIPE = dict(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=None,
    interpolation="bicubic",
    re_prob=0.25,
    re_mode="pixel",
)
KEYS = [(0, index, repeat) for index in range(12) for repeat in range(2)]


def training(root, **settings):
    data = images_in(root, **{"img_size": SIZE} | settings)
    data.setup("fit")
    return data


def expected(data, key, transform):
    path, _ = data.train_images.samples[key[1]]
    seed_generators(seeds.image(0, *key))
    return transform(load_image(path))


def assert_exact(root, settings, transform):
    """The backend "timm" has the pixels of the transform."""
    data = training(root, backend="timm", **settings)
    for key in KEYS:
        pixels, _ = data.train_images[key]
        assert torch.equal(pixels, expected(data, key, transform))


def assert_near(root, settings, transform):
    """What an extra reads faster has nearly those pixels; without it they are the same."""
    data = training(root, **settings)
    std = torch.tensor(data.settings.std).view(-1, 1, 1)
    differences = []
    for key in KEYS:
        reference = expected(data, key, transform)
        pixels, _ = data.train_images[key]
        erased = None
        if data.pipeline:
            pixels, erased = pixels
            [pixels] = data.normalize_and_erase(pixels[None])
        levels = 255 * std * (pixels - reference).abs()
        if erased is not None:  # whose noise is another
            _, top, left, height, width = erased
            levels[:, top : top + height, left : left + width] = 0
        differences.append(levels.mean().item())
    assert np.mean(differences) < 0.1
    assert max(differences) < 1


@over_table(__file__, "training")
def test_training_pixels_are_timms(two_classes, settings):
    transform = create_transform(SIZE, is_training=True, **RECIPE | settings)
    assert_exact(two_classes, settings, transform)
    assert_near(two_classes, settings, transform)


SQUARE = {
    "squash": [transforms.Resize((SIZE, SIZE), interpolation=transforms.InterpolationMode.BICUBIC)],
    "pad": create_transform(
        SIZE, crop_mode="border", crop_pct=1.0, interpolation="bicubic"
    ).transforms[:2],
}
"""What makes an image square in evaluation."""
NORMALIZE = [
    transforms.ToTensor(),
    transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
]


@pytest.mark.parametrize("fit", SQUARE)
def test_the_whole_image_is_fitted_as_for_evaluation(two_classes, fit):
    whole = dict(fit=fit, scale=(1.0, 1.0), ratio=(1.0, 1.0), auto_augment=None, erase_prob=0.0)
    flip = transforms.RandomHorizontalFlip()
    transform = transforms.Compose([*SQUARE[fit], flip, *NORMALIZE])
    assert_exact(two_classes, whole, transform)
    assert_near(two_classes, whole, transform)


@pytest.mark.parametrize("fit", SQUARE)
def test_a_crop_is_fitted_as_an_image_is_for_evaluation(two_classes, fit):
    settings = dict(fit=fit, hflip=0.0, auto_augment=None, erase_prob=0.0)
    crop = ShapedCrop((0.08, 1.0), (3 / 4, 4 / 3))
    transform = transforms.Compose([crop, *SQUARE[fit], *NORMALIZE])
    assert_exact(two_classes, settings, transform)
    assert_near(two_classes, settings, transform)


OWN = """
import random

import numpy as np
import torch


def square(image):
    left, top = random.randint(0, 20), np.random.randint(0, 20)
    image = image.copy()
    image.paste((int(torch.randint(256, ())), 0, 0), (left, top, left + 9, top + 9))
    return image
"""


@pytest.mark.parametrize("policy", [RECIPE["auto_augment"], None])
def test_operations_of_ones_own_follow_the_policy(two_classes, tmp_path, monkeypatch, policy):
    (tmp_path / "own_operations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_operations")
    stages = create_transform(
        SIZE, is_training=True, separate=True, **RECIPE | dict(auto_augment=policy)
    )
    transform = transforms.Compose([*stages[:2], own.square, stages[2]])
    settings = dict(auto_augment=policy, augment_ops=["own_operations:square"])
    assert_exact(two_classes, settings, transform)
    assert_near(two_classes, settings, transform)


# Evaluation


def assert_evaluated(data, transform):
    data.setup("validate")
    mode = "L" if data.settings.in_chans == 1 else "RGB"
    for index, (path, _) in enumerate(data.val_images.samples):
        pixels, _ = data.val_images[index]
        [image] = data.normalize_and_erase(pixels[None])
        assert torch.equal(image, transform(load_image(path).convert(mode)))


@over_table(__file__, "evaluation")
@pytest.mark.parametrize("img_size", [50, 96])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_evaluation_pixels_are_timms(two_classes, img_size, crop_pct, fit, crop_mode):
    data = images_in(two_classes, img_size=img_size, crop_pct=crop_pct, fit=fit)
    timms = dict(interpolation="bicubic", crop_pct=crop_pct, crop_mode=crop_mode)
    assert_evaluated(data, create_transform(img_size, **timms))


# Gray

GRAY = dict(input_size=(1, SIZE, SIZE), interpolation="bicubic", mean=(0.458971,), std=(0.225609,))


def test_imagenets_mean_and_deviation_are_weighted_as_pillow_weights_colors():
    assert [*GREY] == [IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD]
    assert Preprocessing(in_chans=1, mean=[0.5] * 3).mean == [0.5]
    for colors, (gray,) in GREY.items():
        pixel = Image.new("RGB", (1, 1), tuple(round(255 * value) for value in colors))
        assert 255 * gray == pytest.approx(pixel.convert("L").getpixel((0, 0)), abs=0.6)
        assert gray == pytest.approx(np.dot(colors, (0.299, 0.587, 0.114)), abs=1e-6)


def test_evaluation_pixels_of_gray_are_timms(two_classes):
    data = images_in(two_classes, img_size=SIZE, in_chans=1, crop_pct=0.9)
    assert (data.settings.mean, data.settings.std) == ([*GRAY["mean"]], [*GRAY["std"]])
    assert_evaluated(data, create_transform(**GRAY, crop_pct=0.9))


def test_training_pixels_of_gray_are_timms(two_classes):
    policy = dict(auto_augment=None, color_jitter=[0.4, 0.4, 0.4, 0.5])
    timms = create_transform(is_training=True, **GRAY, re_prob=0.5, re_mode="pixel", **policy)
    settings = dict(in_chans=1, erase_prob=0.5, **policy)
    assert_exact(two_classes, settings, lambda image: timms(image.convert("L")))
