"""The augmentation operations on arrays against timm's on images, on real photographs."""

import random

import numpy as np
import pytest
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP

from cait.extras.fast_input.ops import on_arrays

SHIFTS = [name for name in NAME_TO_OP if name.startswith(("Shear", "Translate"))]


def images(photographs):
    """Crops of several sizes, one with a frame of pure colors and one of a single color."""
    for number, (width, height) in enumerate([(96, 96), (64, 40), (33, 57), (5, 4)]):
        yield photographs[number % 2].resize((width, height), Image.Resampling.BICUBIC)
    framed = Image.new("RGB", (48, 48), (255, 0, 255))
    framed.paste(photographs[0].resize((40, 40)), (4, 4))
    yield framed
    yield Image.new("RGB", (20, 30), (3, 200, 77))


def differences(name, image, amount, resample=Image.Resampling.BICUBIC):
    settings = dict(fillcolor=(124, 116, 104), resample=resample)
    random.seed(0)  # a blur draws its radius
    theirs = np.asarray(NAME_TO_OP[name](image, *amount, **settings)).astype(int)
    given = np.array(image)
    random.seed(0)
    ours = on_arrays(NAME_TO_OP[name])(given, *amount, **settings)
    assert (ours.dtype, ours.shape) == (np.uint8, given.shape)
    assert ours.flags.c_contiguous
    assert ours.flags.writeable
    np.testing.assert_array_equal(given, np.asarray(image))  # it is the caller's
    return np.abs(theirs - ours)


@pytest.mark.parametrize("name", sorted(NAME_TO_OP))
def test_operations_are_timms(photographs, name):
    found = []
    for seed in range(10):
        for image in images(photographs):
            random.seed(seed)
            level = LEVEL_TO_ARG[name]
            amount = level(random.uniform(0, 10), dict(translate_const=90)) if level else ()
            found.append(differences(name, image, amount))
    assert max(difference.max() for difference in found) <= (1 if name in SHIFTS else 0)
    assert np.mean([difference.mean() for difference in found]) < 0.01


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("amount", [0.0, 1.0, -0.5, -0.98, 3.4, 1e9])
def test_shifts_of_any_size_are_timms(photographs, name, amount):
    for image in images(photographs):
        if name in ("TranslateX", "TranslateY"):
            amount *= image.width
        assert differences(name, image, (amount,)).max() <= 1


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.NEAREST])
def test_shifts_by_another_filter_are_pillows(photographs, name, resample):
    assert differences(name, photographs[0].resize((40, 40)), (0.3,), resample).max() == 0
