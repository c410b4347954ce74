"""Training and evaluation transforms: the same pixels as timm's, and drawn from the same distributions."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modules import images_in
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torchvision import transforms

from cait import seeds
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import seed_generators
from cait.data.loader import Key
from cait.data.reading import load_image
from cait.data.transforms import ShapedCrop
from cait.errors import UserError

SIZE = 48
RECIPE = dict(auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)


def train_set(root: Path, **settings: object) -> ImageNetDataModule:
    data = images_in(root, **(dict(img_size=SIZE) | settings))
    data.setup("fit")
    return data


def finished(data: ImageNetDataModule, item: Any) -> Tensor:
    """An augmented image as the network sees it, whatever the backend."""
    if isinstance(item, Tensor):
        return item
    pixels, erased = item
    return data.normalize_and_erase(pixels[None], [(0, erased)] if erased else [])[0]


def trained_on(data: ImageNetDataModule, key: Key) -> Tensor:
    return finished(data, data.train_images[key][0])


KEYS = [(0, index, repeat) for index in range(12) for repeat in range(2)]


# Settings of ours beside what they are called in timm, where they are left out they are the recipe's.
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, RECIPE),
        (
            dict(auto_augment="3a", color_jitter=0.3),
            RECIPE | dict(auto_augment="3a", color_jitter=0.3),
        ),
        (dict(auto_augment=None, color_jitter=0.4), dict(re_prob=0.25, color_jitter=0.4)),
        (
            dict(auto_augment=None, color_jitter=[0.4, 0.2, 0.1, 0.5]),
            dict(re_prob=0.25, color_jitter=(0.4, 0.2, 0.1, 0.5)),
        ),
        (dict(auto_augment="original-mstd0.5"), RECIPE | dict(auto_augment="original-mstd0.5")),
        (dict(auto_augment="augmix-m5-w4"), RECIPE | dict(auto_augment="augmix-m5-w4")),
        (dict(interpolation="bilinear"), RECIPE | dict(interpolation="bilinear")),
        (
            dict(scale=[0.5, 0.6], ratio=[1.0, 2.0]),
            RECIPE | dict(scale=(0.5, 0.6), ratio=(1.0, 2.0)),
        ),
        (
            dict(mean=[0.5, 0.4, 0.3], std=[0.1, 0.2, 0.3]),
            RECIPE | dict(mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3)),
        ),
    ],
)
def test_training_pixels_are_timms(two_classes: Path, settings: dict, theirs: dict) -> None:
    common: dict = dict(
        input_size=SIZE,
        is_training=True,
        interpolation="bicubic",
        re_mode="pixel",
        color_jitter=None,
    )
    assert_pixels(two_classes, settings, create_transform(**(common | theirs)))


def assert_pixels(
    two_classes: Path, settings: dict, transform: Callable[[Image.Image], Tensor]
) -> None:
    """With these settings timm's backend has the pixels of `transform`, and ours nearly."""
    exact, plain = (
        train_set(two_classes, backend="timm", **settings),
        train_set(two_classes, backend="timm"),
    )
    fast = train_set(two_classes, **settings)
    std = torch.tensor(settings.get("std", IMAGENET_DEFAULT_STD)).view(3, 1, 1)
    levels, moved = [], False
    for key in KEYS:
        source, _ = exact.train_images.samples[key[1]]
        seed_generators(seeds.image(0, *key))
        reference = transform(load_image(source))
        image = trained_on(exact, key)
        assert torch.equal(image, reference)
        moved = moved or not torch.equal(image, trained_on(plain, key))
        item, _ = fast.train_images[key]
        pixels, erased = item if fast.pipeline else (item, None)
        difference = (
            (finished(fast, (pixels, None) if fast.pipeline else pixels) - reference).abs()
            * std
            * 255
        )
        if erased is not None:  # whose noise is another
            _, top, left, height, width = erased
            difference[:, top : top + height, left : left + width] = 0
        levels.append(difference.mean().item())
    assert moved or not settings  # else this would show nothing
    assert np.mean(levels) < 0.1
    assert max(levels) < 1


FITTED = {
    "squash": [transforms.Resize((SIZE, SIZE), interpolation=transforms.InterpolationMode.BICUBIC)],
    "pad": create_transform(
        SIZE, crop_mode="border", crop_pct=1.0, interpolation="bicubic"
    ).transforms[:2],
}


WHOLE: dict = dict(scale=[1.0, 1.0], ratio=[1.0, 1.0])


@pytest.mark.parametrize("fit", FITTED)
@pytest.mark.parametrize(
    "settings", [WHOLE, dict(hflip=0.0)], ids=["the whole image, as evaluation sees it", "a crop"]
)
def test_a_crop_is_fitted_as_an_image_is_for_evaluation(
    two_classes: Path, settings: dict, fit: str
) -> None:
    drawn, flip = ShapedCrop((0.08, 1.0), (3 / 4, 4 / 3)), transforms.RandomHorizontalFlip()
    steps = [*FITTED[fit], flip] if settings is WHOLE else [drawn, *FITTED[fit]]
    rest = [
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    ]
    settings = settings | dict(fit=fit, auto_augment=None, erase_prob=0.0)
    assert_pixels(two_classes, settings, transforms.Compose([*steps, *rest]))


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_a_padded_image_keeps_at_least_a_pixel(backend: str, tmp_path: Path) -> None:
    """timm would resize a side of less than half a pixel to none."""
    for number, size in enumerate([(900, 1), (1, 900), (40, 40), (50, 30)] * 2):
        path = tmp_path / ("train", "val")[number % 2] / "ab"[number // 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, "red").save(path)
    data = train_set(
        tmp_path, fit="pad", backend=backend, repeats=1, batch_size=2, erase_prob=0.0, **WHOLE
    )
    assert len(list(data.train_dataloader())) == 2
    pixels, background = (
        data.val_images[0][0],
        [round(255 * value) for value in IMAGENET_DEFAULT_MEAN],
    )
    assert (pixels != torch.tensor(background)).any(dim=2).sum() == SIZE  # a column


OWN = """
import random
import numpy as np, torch

def square(image):
    place = random.randint(0, 20), np.random.randint(0, 20)
    image = image.copy()
    image.paste((int(torch.randint(256, ())), 0, 0), (*place, place[0] + 9, place[1] + 9))
    return image

def gray(image):
    return image.convert("L")

def none(image):
    pass

def two(image, other):
    return image
"""


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", None])
def test_operations_of_ones_own_follow_the_policy(
    two_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    (tmp_path / "own_operations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    settings = dict(auto_augment=policy, augment_ops=["own_operations:square"])
    recipe: dict = RECIPE | dict(
        auto_augment=policy, color_jitter=None, interpolation="bicubic", re_mode="pixel"
    )
    first, second, final = create_transform(SIZE, is_training=True, separate=True, **recipe)
    found = importlib.import_module("own_operations")
    assert_pixels(two_classes, settings, lambda image: final(found.square(second(first(image)))))
    for name, words in (
        ("gray", r"must return an image in RGB of \(\d+, \d+\), as it gets, not an image in L"),
        ("none", "as it gets, not NoneType"),
    ):
        with pytest.raises(UserError, match=words):
            train_set(two_classes, augment_ops=[f"own_operations:{name}"]).train_images[0, 0, 0]
    with pytest.raises(TypeError, match="two"):  # as it is: its traceback names the line
        train_set(two_classes, augment_ops=["own_operations:two"]).train_images[0, 0, 0]
    with pytest.raises(
        UserError, match="cannot import own_operations:nothing: own_operations has no 'nothing'"
    ):
        train_set(two_classes, augment_ops=["own_operations:nothing"])


class Own(ImageNetDataModule):
    """Transforms of one's own, as a user writes them."""

    def __init__(self, *, as_float: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.as_float = as_float

    def make_train_transform(self) -> Any:
        steps = [transforms.RandomCrop(SIZE, pad_if_needed=True), transforms.PILToTensor()]
        if self.as_float:
            steps += [
                transforms.ConvertImageDtype(torch.float32),
                transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
            ]
        return transforms.Compose(steps)

    make_eval_transform = make_train_transform


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_brings_its_own_transforms(two_classes: Path, workers: int) -> None:
    found = []
    for as_float in (False, True):
        data = Own(
            as_float=as_float,
            root=str(two_classes),
            img_size=SIZE,
            batch_size=4,
            num_workers=workers,
        )
        data.setup("fit")
        found.append([image for image, _ in data.train_dataloader()])
        assert all(
            image.shape == (4, 3, SIZE, SIZE) and image.dtype == torch.float32
            for image in found[-1]
        )
    assert len(found[0]) == 3
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(*found, strict=True))
    crop = transforms.RandomCrop(SIZE, pad_if_needed=True)
    seed_generators(seeds.image(0, 0, 7, 1))
    expected = transforms.functional.to_tensor(crop(load_image(data.train_images.samples[7][0])))
    expected = transforms.functional.normalize(
        expected, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    )
    assert torch.equal(data.train_images[0, 7, 1][0], expected)


@pytest.mark.parametrize(
    ("fit", "crop_mode"), [("crop", None), ("pad", "border"), ("squash", "squash")]
)
@pytest.mark.parametrize("img_size", [50, 96])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_evaluation_pixels_are_timms(
    two_classes: Path, img_size: int, crop_pct: float, fit: str, crop_mode: str | None
) -> None:
    data = images_in(two_classes, img_size=img_size, crop_pct=crop_pct, fit=fit)
    data.setup("validate")
    theirs = create_transform(
        img_size, interpolation="bicubic", crop_pct=crop_pct, crop_mode=crop_mode
    )
    for index, (path, _) in enumerate(data.val_images.samples):
        assert torch.equal(
            data.normalize_and_erase(data.val_images[index][0][None])[0], theirs(load_image(path))
        )
