"""The augmentation operations on arrays against timm's on images, on real photographs."""

import random

import numpy as np
import pytest
from harness import over_table
from PIL import Image, ImageOps
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP

from cait.extras.fast_input.ops import on_arrays

SHIFTS = [name for name in NAME_TO_OP if name.startswith(("Shear", "Translate"))]


SIZES = [(96, 96), (64, 40), (33, 57), (5, 4)]
BICUBIC = Image.Resampling.BICUBIC


def images(photographs):
    """Photographs of several sizes, one in a frame of a pure color, and an image of a single color."""
    for number, size in enumerate(SIZES):
        yield photographs[number % 2].resize(size)
    yield ImageOps.expand(photographs[0].resize((40, 40)), 4, (255, 0, 255))
    yield Image.new("RGB", (20, 30), (3, 200, 77))


def differences(name, image, amount, resample=BICUBIC):
    settings = dict(fillcolor=(124, 116, 104), resample=resample)
    random.seed(0)  # a blur draws its radius
    theirs = np.asarray(NAME_TO_OP[name](image, *amount, **settings))
    pixels = np.array(image)
    random.seed(0)
    ours = on_arrays(NAME_TO_OP[name])(pixels, *amount, **settings)
    assert ours.dtype == np.uint8
    assert ours.flags.carray  # it can be written to
    np.testing.assert_array_equal(pixels, image)  # it is the caller's
    return np.abs(theirs.astype(int) - ours)


@pytest.mark.parametrize("name", sorted(NAME_TO_OP))
def test_operations_are_timms(photographs, name):
    level = LEVEL_TO_ARG[name]
    means = []
    for seed in range(10):
        for image in images(photographs):
            random.seed(seed)
            amount = level(random.uniform(0, 10), dict(translate_const=90)) if level else ()
            difference = differences(name, image, amount)
            assert difference.max() <= (1 if name in SHIFTS else 0)
            means.append(difference.mean())
    assert np.mean(means) < 0.01


@pytest.mark.parametrize("name", SHIFTS)
@over_table(__file__, "shifts", sampling="BICUBIC")
def test_shifts_of_any_size_and_by_any_filter_are_timms(photographs, name, amount, sampling):
    resample = Image.Resampling[sampling]
    most = 1 if resample == BICUBIC else 0
    for image in images(photographs):
        size = image.width if name in ("TranslateX", "TranslateY") else 1
        assert differences(name, image, (amount * size,), resample).max() <= most
