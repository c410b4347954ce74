"""What a policy drew for an image, as numbers: a worker writes them down, the device does them.

A step is one operation of the policy. It is a record of `STEP`: which operation, six amounts and a table. A warp has
Pillow's matrix as amounts: the pixel (x, y) comes from (a·x + b·y + c, d·x + e·y + f). An operation that replaces each
value by another, whatever the image, has the 256 new values as its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from PIL import Image
from timm.data import auto_augment

from cait.extras.fast_input.ops import on_arrays

STEP = np.dtype([("amounts", "<f8", 6), ("code", "<i4"), ("unused", "<i4"), ("table", "u1", 256)])
FLIP = 256
"""Added to the code of the first step: the image is flipped before it."""
RAMP = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)
BICUBIC = Image.Resampling.BICUBIC
Amounts = tuple[float, ...]


class Code(IntEnum):
    """Operations; from SHEAR_X on they are warps."""

    KEEP = 0
    TABLE = 1
    AUTO_CONTRAST = 2
    EQUALIZE = 3
    CONTRAST = 4
    COLOR = 5
    SHARPNESS = 6
    SHEAR_X = 7
    SHEAR_Y = 8
    TRANSLATE_X = 9
    TRANSLATE_Y = 10
    ROTATE = 11


def _rotation(side: int, degrees: float) -> Amounts:
    """The matrix of Pillow's `Image.rotate`, rounded as there, about the centre of a square image."""
    angle, centre = -math.radians(degrees % 360.0), side / 2
    cos, sin, minus_sin = (round(value, 15) for value in (math.cos(angle), math.sin(angle), -math.sin(angle)))
    c, f = cos * -centre + sin * -centre + 0.0, minus_sin * -centre + cos * -centre + 0.0
    return cos, sin, c + centre, minus_sin, cos, f + centre


Matrix = Callable[[int, float], Amounts]
"""Of the image's side and the operation's amount."""
WARPS: dict[Any, tuple[Code, Matrix]] = {
    auto_augment.shear_x: (Code.SHEAR_X, lambda side, factor: (1, factor, 0, 0, 1, 0)),
    auto_augment.shear_y: (Code.SHEAR_Y, lambda side, factor: (1, 0, 0, factor, 1, 0)),
    auto_augment.translate_x_abs: (Code.TRANSLATE_X, lambda side, pixels: (1, 0, pixels, 0, 1, 0)),
    auto_augment.translate_y_abs: (Code.TRANSLATE_Y, lambda side, pixels: (1, 0, 0, 0, 1, pixels)),
    auto_augment.translate_x_rel: (Code.TRANSLATE_X, lambda side, share: (1, 0, share * side, 0, 1, 0)),
    auto_augment.translate_y_rel: (Code.TRANSLATE_Y, lambda side, share: (1, 0, 0, 0, 1, share * side)),
    auto_augment.rotate: (Code.ROTATE, _rotation),
}
TABLES = (
    auto_augment.brightness,
    auto_augment.invert,
    auto_augment.posterize,
    auto_augment.solarize,
    auto_augment.solarize_add,
)
OTHERS: dict[Any, Code] = {
    auto_augment.auto_contrast: Code.AUTO_CONTRAST,
    auto_augment.equalize: Code.EQUALIZE,
    auto_augment.contrast: Code.CONTRAST,
    auto_augment.color: Code.COLOR,
    auto_augment.sharpness: Code.SHARPNESS,
}
DONE = {code: on_arrays(timms) for timms, code in OTHERS.items()}


class Note:
    """Takes the place of one of timm's functions in a policy: notes the operation instead of doing it."""

    def __init__(self, timms: Callable[..., Image.Image], side: int) -> None:
        self.timms, self.side = timms, side

    @staticmethod
    def knows(timms: Callable[..., Image.Image], resample: Any) -> bool:
        """Whether the device can do this operation; it warps with the bicubic filter alone."""
        return timms in OTHERS or timms in TABLES or (timms in WARPS and resample == BICUBIC)

    def __call__(self, steps: list[Any], *amount: float, **_: Any) -> list[Any]:
        """Take the steps so far in the place of an image, and return them with this one."""
        code, amounts, table = Code.TABLE, amount, None
        if self.timms in WARPS:
            code, matrix = WARPS[self.timms]
            amounts = matrix(self.side, *amount)
        elif self.timms in OTHERS:
            code = OTHERS[self.timms]
        else:
            amounts, table = (), on_arrays(self.timms)(RAMP, *amount)[0, :, 0]
        return [*steps, (code, amounts, table)]


def record(steps: list[Any], places: int, flips: bool) -> np.ndarray:
    """The steps of an image as an array of STEP of the shape [places]."""
    noted = np.zeros(places, STEP)
    for row, (code, amounts, table) in zip(noted, steps, strict=False):
        row["code"] = code
        row["amounts"][: len(amounts)] = amounts
        if table is not None:
            row["table"] = table
    noted[0]["code"] += FLIP * flips
    return noted


def apply(pixels: np.ndarray, step: np.ndarray, fill: tuple[int, int, int]) -> np.ndarray:
    """Do one step on uint8 [S, S, 3] as a worker would; `fill` is the colour around a warped image."""
    code, amounts = int(step["code"]), step["amounts"].tolist()
    if code & FLIP:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    code &= ~FLIP
    how: Any = dict(resample=BICUBIC, fillcolor=fill)
    if code == Code.KEEP:
        return pixels
    if code == Code.TABLE:
        return step["table"][pixels]
    if code in DONE:
        return DONE[Code(code)](pixels, *amounts[: code >= Code.CONTRAST])
    if code == Code.ROTATE:
        image = Image.fromarray(pixels)
        return np.array(image.transform(image.size, Image.Transform.AFFINE, amounts, **how))
    timms, place = SHIFTS[Code(code)]
    return on_arrays(timms)(pixels, amounts[place], **how)


SHIFTS = {
    Code.SHEAR_X: (auto_augment.shear_x, 1),
    Code.SHEAR_Y: (auto_augment.shear_y, 3),
    Code.TRANSLATE_X: (auto_augment.translate_x_abs, 2),
    Code.TRANSLATE_Y: (auto_augment.translate_y_abs, 5),
}
"""The function that does a warp, and which of the amounts is its own."""
