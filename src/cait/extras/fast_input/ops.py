"""timm's augmentation operations on arrays, uint8 [height, width, 3], many of them faster than Pillow's.

Each replaces a function of `timm.data.auto_augment`, takes its arguments and gives its pixels. Here and there
a pixel differs by one level, because a float was rounded differently.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from timm.data import auto_augment
from torch import Tensor

Fill = tuple[int, int, int]
OnImage = Callable[..., Image.Image]
OnArray = Callable[..., ndarray]
Shift = Callable[[ndarray, float, Fill], ndarray]


def on_arrays(timms: OnImage) -> OnArray:
    """The array form of one of timm's functions on PIL images."""
    return OPERATIONS.get(timms) or partial(_by_pillow, timms)


def _by_pillow(timms: OnImage, pixels: ndarray, *amount: Any, **settings: Any) -> ndarray:
    return np.array(timms(Image.fromarray(pixels), *amount, **settings))


def _invert(pixels: ndarray, **_: Any) -> ndarray:
    return ~pixels


def _posterize(pixels: ndarray, bits_to_keep: int, **_: Any) -> ndarray:
    return pixels & np.uint8(0xFF << (8 - min(bits_to_keep, 8)) & 0xFF)


def _solarize(pixels: ndarray, thresh: int, **_: Any) -> ndarray:
    return pixels ^ (pixels >= thresh).view(np.uint8) * np.uint8(255)


def _solarize_add(pixels: ndarray, add: int, thresh: int = 128, **_: Any) -> ndarray:
    return pixels + np.minimum((pixels < thresh).view(np.uint8) * np.uint8(add), 255 - pixels)


def _sharpness(pixels: ndarray, factor: float, **_: Any) -> ndarray:
    """Blend the image and its blur by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13; the outermost pixels stay."""
    x = pixels.reshape(len(pixels), -1).astype(np.int16)  # channels side by side
    middle = x[1:-1, 3:-3]
    rows = x[:, :-6] + x[:, 3:-3] + x[:, 6:]
    blurred = (2 * (rows[:-2] + rows[1:-1] + rows[2:] + 4 * middle) + 13) // 26  # rounded
    blended = (middle - blurred) * np.float32(factor) + blurred
    x[1:-1, 3:-3] = blended.clip(0, 255, out=blended)
    return x.astype(np.uint8).reshape(pixels.shape)


def _bicubic(
    timms: OnImage,
    ours: Shift,
    pixels: ndarray,
    amount: float,
    resample: Any,
    fillcolor: Fill,
) -> ndarray:
    """A shear or a translation; Pillow does it for any filter but the bicubic."""
    if resample != Image.Resampling.BICUBIC:
        return _by_pillow(timms, pixels, amount, resample=resample, fillcolor=fillcolor)
    return ours(pixels, amount, fillcolor)


def _transposed(pixels: ndarray) -> ndarray:
    height, width, _ = pixels.shape
    turned = np.empty((width, height, 3), np.uint8)
    for channel in range(3):  # takes a quarter of the time of copying pixel by pixel
        turned[..., channel] = pixels[..., channel].T
    return turned


def _sheared(pixels: ndarray, factor: float, fill: Fill) -> ndarray:
    """Pixel x of row y comes from x + (y + ½) · factor, so each row has its own shift."""
    height, width, _ = pixels.shape
    padded, windows = _rows(height, width, fill)
    margin = width + 4
    padded[:, margin:-margin] = _with_edges(pixels, axis=1)
    shifts = (np.arange(height) + 0.5) * factor
    whole = np.floor(shifts).clip(-width - 4, width + 4)
    begin = margin + 1 + whole.astype(np.intp)
    moved = _filtered(windows[np.arange(height), 3 * begin], shifts - whole, axis=1).reshape(
        pixels.shape
    )
    # The filter mixes the fill into up to four pixels on either side; those count as outside.
    first = np.ceil(-shifts - 0.5).clip(-width - 9, width + 9).astype(np.intp)[:, None]
    columns = np.concatenate([first + np.arange(-4, 0), first + width + np.arange(4)], axis=1)
    rows, which = np.nonzero((columns >= 0) & (columns < width))
    moved[rows, columns[rows, which]] = fill
    return moved


def _sheared_along_y(pixels: ndarray, factor: float, fill: Fill) -> ndarray:
    return _transposed(_sheared(_transposed(pixels), factor, fill))


@cache
def _rows(height: int, width: int, fill: Fill) -> tuple[ndarray, ndarray]:
    """Rows between margins of the color `fill`, and for each row all its windows of width + 3 pixels."""
    padded = np.empty((height, 3 * width + 12, 3), np.uint8)
    padded[:] = fill
    return padded, sliding_window_view(padded.reshape(height, -1), 3 * (width + 3), axis=1)


def _translated(pixels: ndarray, amount: float, fill: Fill, axis: int) -> ndarray:
    """Shift by `amount` of the side."""
    height, width, _ = pixels.shape
    size = pixels.shape[axis]
    shift = amount * size
    whole = math.floor(shift)
    moved = np.empty_like(pixels)
    moved.reshape(height, -1)[:] = np.tile(np.array(fill, np.uint8), width)
    first = max(0, math.ceil(-shift - 0.5))  # of the pixels inside
    last = min(size, math.ceil(size - shift - 0.5))
    if first < last:
        before = (slice(None),) * axis
        taps = _with_edges(pixels, axis)[(*before, slice(first + whole + 1, last + whole + 4))]
        inside = moved[(*before, slice(first, last))]
        inside[:] = _filtered(taps.reshape(len(taps), -1), np.array([shift - whole]), axis).reshape(
            inside.shape
        )
    return moved


def _with_edges(pixels: ndarray, axis: int) -> ndarray:
    """Repeat the first and the last along the axis twice, as the filter sees them beyond the image."""
    return np.concatenate(
        [np.take(pixels, [0, 0], axis), pixels, np.take(pixels, [-1, -1], axis)], axis
    )


def _filtered(taps: ndarray, d: ndarray, axis: int) -> ndarray:
    """Pillow's bicubic filter, a = -1, along one axis: uint8 [h, 3 (w + 3)] to [h, 3 w], or [h + 3, w] to [h, w].

    d is the distance of a place from the second of its four taps, in [0, 1], for each row or for all.
    """
    d = np.clip(d, 0, 1)
    weights = [d * (d * (2 - d) - 1), d * d * (d - 2) + 1, d * (d * (1 - d) + 1), d * d * (d - 1)]
    step = 3 if axis else 1
    length = taps.shape[axis] - 3 * step
    floats = _scratch(0, taps.shape).copy_(torch.from_numpy(taps))
    values = _scratch(1, (len(taps), length) if axis else (length, taps.shape[1]))
    for tap, weight in enumerate(torch.from_numpy(np.stack(weights).astype(np.float32))[..., None]):
        pixels = floats.narrow(axis, step * tap, length)
        if tap:
            values.addcmul_(pixels, weight)
        else:
            torch.mul(pixels, weight, out=values)
    values.add_(2e-4).clamp_(0, 255)  # Pillow truncates: a whole number must not fall below itself
    return values.numpy().astype(np.uint8)


def _scratch(number: int, shape: tuple[int, ...]) -> Tensor:
    """Memory to work in. It is kept, because getting it from the system again takes longer than the work."""
    size = math.prod(shape)
    if number not in SCRATCH or len(SCRATCH[number]) < size:
        SCRATCH[number] = torch.empty(size)
    return SCRATCH[number][:size].view(shape)


SCRATCH: dict[int, Tensor] = {}
SHIFTS: dict[OnImage, Shift] = {
    auto_augment.shear_x: _sheared,
    auto_augment.shear_y: _sheared_along_y,
    auto_augment.translate_x_rel: partial(_translated, axis=1),
    auto_augment.translate_y_rel: partial(_translated, axis=0),
}
OPERATIONS: dict[OnImage, OnArray] = {
    auto_augment.invert: _invert,
    auto_augment.posterize: _posterize,
    auto_augment.sharpness: _sharpness,
    auto_augment.solarize: _solarize,
    auto_augment.solarize_add: _solarize_add,
    **{timms: partial(_bicubic, timms, ours) for timms, ours in SHIFTS.items()},
}
"""Array operations by the functions of timm that they replace."""
