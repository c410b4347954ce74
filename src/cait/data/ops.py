"""timm's augmentation operations on arrays, uint8 [height, width, 3], many of them faster than Pillow's.

Each takes the arguments of the function in `timm.data.auto_augment` that it stands for, and gives its pixels,
but for a level here and there where a float was rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

BESIDE = np.array([-4, -3, -2, -1])
"""Places outside a row at which the filter meets pixels of it."""


def on_arrays(timms: Callable[..., Image.Image]) -> Callable[..., np.ndarray]:
    """The operation on arrays that one of timm's functions is on pictures."""
    return OPERATIONS.get(timms) or partial(_by_pillow, timms)


def _by_pillow(timms: Callable[..., Image.Image], pixels: np.ndarray, *amount: Any, **settings: Any) -> np.ndarray:
    return np.array(timms(Image.fromarray(pixels), *amount, **settings))


def _invert(pixels: np.ndarray, **_: Any) -> np.ndarray:
    return ~pixels


def _posterize(pixels: np.ndarray, bits_to_keep: int, **_: Any) -> np.ndarray:
    return pixels & np.uint8(0xFF << (8 - min(bits_to_keep, 8)) & 0xFF)


def _solarize(pixels: np.ndarray, thresh: int, **_: Any) -> np.ndarray:
    return pixels ^ (pixels >= thresh).view(np.uint8) * np.uint8(255)


def _solarize_add(pixels: np.ndarray, add: int, thresh: int = 128, **_: Any) -> np.ndarray:
    return pixels + np.minimum((pixels < thresh).view(np.uint8) * np.uint8(add), 255 - pixels)


def _sharpness(pixels: np.ndarray, factor: float, **_: Any) -> np.ndarray:
    """Away from the picture under [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13; the outermost pixels stay."""
    x = pixels.reshape(len(pixels), -1).astype(np.int16)  # channels side by side
    middle = x[1:-1, 3:-3]
    rows = x[:, :-6] + x[:, 3:-3] + x[:, 6:]
    blurred = (2 * (rows[:-2] + rows[1:-1] + rows[2:] + 4 * middle) + 13) // 26  # rounded
    blended = (middle - blurred) * np.float32(factor) + blurred
    x[1:-1, 3:-3] = blended.clip(0, 255, out=blended)
    return x.astype(np.uint8).reshape(pixels.shape)


def _shift(name: str, pixels: np.ndarray, amount: float, **settings: Any) -> np.ndarray:
    """A shear or a translation."""
    if settings["resample"] != Image.Resampling.BICUBIC:
        return _by_pillow(getattr(auto_augment, name), pixels, amount, **settings)
    along_x = "_x" in name
    rows = pixels if along_x else _transposed(pixels)
    height, width, _ = rows.shape
    if name.startswith("shear"):
        shifts = (np.arange(height) + 0.5) * amount
    else:
        shifts = np.full(height, amount * (width if name.endswith("rel") else 1))
    moved = _shifted(rows, shifts, settings["fillcolor"])
    return moved if along_x else _transposed(moved)


def _transposed(pixels: np.ndarray) -> np.ndarray:
    turned = np.empty((pixels.shape[1], pixels.shape[0], 3), np.uint8)
    for channel in range(3):  # in a quarter of the time that copying pixel by pixel takes
        turned[..., channel] = pixels[..., channel].T
    return turned


def _shifted(pixels: np.ndarray, shifts: np.ndarray, fill: tuple[int, int, int]) -> np.ndarray:
    """Pixel x of row y from place x + shifts[y] by Pillow's bicubic filter; `fill` where that is outside.

    Each row moves by a number of pixels of its own, so the 4 × 4 taps of the filter come to 4.
    """
    height, width, _ = pixels.shape
    margin, padded, windows, taps, values = _memory(height, width, fill)
    padded[:, margin : margin + width] = pixels
    padded[:, margin - 2 : margin] = pixels[:, :1]  # the filter finds the outermost again beyond them
    padded[:, margin + width : margin + width + 2] = pixels[:, -1:]
    whole = np.floor(shifts).clip(-width - 4, width + 4)
    d = (shifts - whole).clip(0, 1)
    begin = margin - 1 + whole.astype(np.intp)
    taps.copy_(torch.from_numpy(windows[np.arange(height), 3 * begin]))
    weights = np.stack([d * (d * (2 - d) - 1), d * d * (d - 2) + 1, d * (d * (1 - d) + 1), d * d * (d - 1)])
    for tap, weight in enumerate(torch.from_numpy(weights.astype(np.float32))[..., None]):
        shifted = taps[:, 3 * tap : 3 * (tap + width)]
        values.addcmul_(shifted, weight) if tap else torch.mul(shifted, weight, out=values)
    values.add_(2e-4).clamp_(0, 255)  # Pillow cuts fractions off: a whole number must not lie below itself
    moved = values.numpy().astype(np.uint8).reshape(pixels.shape)
    first = np.ceil(-shifts - 0.5).clip(-width - 9, width + 9).astype(np.intp)[:, None]  # whose centre lies inside
    columns = np.concatenate([first + BESIDE, first + width - 1 - BESIDE], axis=1)
    rows, which = np.nonzero((columns >= 0) & (columns < width))
    moved[rows, columns[rows, which]] = fill
    return moved


@cache
def _memory(height: int, width: int, fill: tuple[int, int, int]) -> tuple[int, np.ndarray, np.ndarray, Tensor, Tensor]:
    """Rows between margins in the colour of `fill`, all windows of them as wide as a row's taps, and room to work.

    It is kept, for freed it would go back to the system, and to be given it anew takes longer than the work.
    """
    margin = width + 6
    padded = np.empty((height, width + 2 * margin, 3), np.uint8)
    padded[:] = fill
    windows = sliding_window_view(padded.reshape(height, -1), 3 * (width + 3), axis=1)
    return margin, padded, windows, torch.empty(height, 3 * (width + 3)), torch.empty(height, 3 * width)


SHIFTS = ["shear_x", "shear_y", "translate_x_rel", "translate_y_rel", "translate_x_abs", "translate_y_abs"]
OPERATIONS: dict[Callable[..., Image.Image], Callable[..., np.ndarray]] = {
    auto_augment.invert: _invert,
    auto_augment.posterize: _posterize,
    auto_augment.sharpness: _sharpness,
    auto_augment.solarize: _solarize,
    auto_augment.solarize_add: _solarize_add,
    **{getattr(auto_augment, name): partial(_shift, name) for name in SHIFTS},
}
"""By the functions of timm's of which they take the place."""
