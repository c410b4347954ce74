"""The steps of a batch on a GPU: for each one kernel that reads and writes an image once, with Pillow's arithmetic.

Pillow warps in float64 and blends in float32, without fused multiply-adds, and truncates; so do these kernels.
Three operations need statistics of the image first; a kernel makes their tables of 256 values from a histogram.
"""

# mypy: ignore-errors
# Triton's language looks like Python, and is not.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cait.extras.fast_input.steps import FLIP, STEP, Code

BLOCK = 1024
"""Pixels that a histogram reads at a time."""
PIXELS, WARPS = 256, 8
"""Pixels of a program, one for each thread: a warp in float64 needs 64 registers for each."""
EIGHTS, FOURS, BYTES = (tl.constexpr(STEP.itemsize // size) for size in (8, 4, 1))
CODE, TABLE = tl.constexpr(STEP.fields["code"][1] // 4), tl.constexpr(STEP.fields["table"][1])
FLIPPED = tl.constexpr(FLIP)
IS_TABLE, AUTO_CONTRAST, EQUALIZE, CONTRAST, COLOR, SHARPNESS, FIRST_WARP = (
    tl.constexpr(int(code))
    for code in (
        Code.TABLE,
        Code.AUTO_CONTRAST,
        Code.EQUALIZE,
        Code.CONTRAST,
        Code.COLOR,
        Code.SHARPNESS,
        Code.SHEAR_X,
    )
)


@triton.jit
def _grey(red, green, blue):
    """Pillow's mode L."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def _byte(value):
    """Clipped to 0 … 255 and truncated."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def _blend(first, second, factor):
    return _byte(first.to(tl.float32) + factor.to(tl.float32) * (second - first).to(tl.float32))


@triton.jit
def _histogram(images, base, pixels, channel, grey: tl.constexpr, BLOCK: tl.constexpr):
    """How often each value is in a channel of an image, or in the grey image [256]."""
    found = tl.zeros([256], tl.int32)
    for start in range(0, pixels, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pixels
        if grey:
            red = tl.load(images + base + at * 3, mask=inside, other=0).to(tl.int32)
            green = tl.load(images + base + at * 3 + 1, mask=inside, other=0).to(tl.int32)
            blue = tl.load(images + base + at * 3 + 2, mask=inside, other=0).to(tl.int32)
            values = _grey(red, green, blue)
        else:
            values = tl.load(images + base + at * 3 + channel, mask=inside, other=0).to(tl.int32)
        found += tl.histogram(values, 256)
    beyond = tl.cdiv(pixels, BLOCK) * BLOCK - pixels  # read as 0
    return found - tl.where(tl.arange(0, 256) == 0, beyond, 0)


@triton.jit
def _tables(images, codes, amounts, tables, step, steps, side, BLOCK: tl.constexpr):
    """Write the table of each image and channel whose operation needs statistics."""
    image, channel = tl.program_id(0), tl.program_id(1)
    place = image * steps + step
    code = tl.load(codes + place * FOURS + CODE) & (FLIPPED - 1)
    if (code == AUTO_CONTRAST) | (code == EQUALIZE) | (code == CONTRAST):
        pixels, values = side * side, tl.arange(0, 256)
        base = image.to(tl.int64) * pixels * 3
        table = values
        if code == CONTRAST:
            counts = _histogram(images, base, pixels, channel, True, BLOCK)
            mean = (2 * tl.sum(counts.to(tl.int64) * values) + pixels) // (2 * pixels)  # rounded
            factor = tl.load(amounts + place * EIGHTS)
            table = _blend(mean.to(tl.int32) + tl.zeros([256], tl.int32), values, factor)
        else:
            counts = _histogram(images, base, pixels, channel, False, BLOCK)
            low = tl.min(tl.where(counts > 0, values, 255))
            high = tl.max(tl.where(counts > 0, values, 0))
            if high > low:
                if code == AUTO_CONTRAST:
                    scale = 255.0 / (high - low).to(tl.float64)
                    table = _byte(values.to(tl.float64) * scale + -low.to(tl.float64) * scale)
                else:
                    last = tl.sum(tl.where(values == high, counts, 0))
                    width = (pixels - last) // 255
                    if width > 0:
                        below = tl.cumsum(counts, 0) - counts
                        table = tl.minimum((width // 2 + below) // width, 255)
        tl.store(tables + (image * 3 + channel) * 256 + values, table.to(tl.uint8))


@triton.jit
def _cubic(v1, v2, v3, v4, d):
    """Pillow's bicubic polynomial, in its order."""
    p2 = v3 - v1
    p3 = 2 * (v1 - v2) + v3 - v4
    p4 = -v1 + v2 - v3 + v4
    return v2 + d * (p2 + d * (p3 + d * p4))


@triton.jit
def _pixel(images, base, row, column, side, flips):
    """Offsets of pixels; beyond the edge they are those of the edge."""
    row = tl.minimum(tl.maximum(row, 0), side - 1)
    column = tl.minimum(tl.maximum(column, 0), side - 1)
    return images + base + (row * side + tl.where(flips, side - 1 - column, column)) * 3


@triton.jit
def _row(images, base, row, column, side, flips, inside, channel, d):
    """Four neighbours in a row, filtered."""
    v1 = tl.load(_pixel(images, base, row, column, side, flips) + channel, mask=inside, other=0)
    v2 = tl.load(_pixel(images, base, row, column + 1, side, flips) + channel, mask=inside, other=0)
    v3 = tl.load(_pixel(images, base, row, column + 2, side, flips) + channel, mask=inside, other=0)
    v4 = tl.load(_pixel(images, base, row, column + 3, side, flips) + channel, mask=inside, other=0)
    return _cubic(v1.to(tl.float64), v2.to(tl.float64), v3.to(tl.float64), v4.to(tl.float64), d)


@triton.jit
def _apply(
    images,
    out,
    codes,
    amounts,
    noted,
    tables,
    step,
    steps,
    side,
    fill_red,
    fill_green,
    fill_blue,
    BLOCK: tl.constexpr,
):
    """Do a step on a block of an image's pixels."""
    image = tl.program_id(1)
    place = image * steps + step
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < side * side
    row, column = at // side, at % side
    base = image.to(tl.int64) * side * side * 3
    code = tl.load(codes + place * FOURS + CODE)
    flips = code >= FLIPPED
    code = code & (FLIPPED - 1)
    factors = amounts + place * EIGHTS
    here = _pixel(images, base, row, column, side, flips)
    if code >= FIRST_WARP:
        x, y = column.to(tl.float64) + 0.5, row.to(tl.float64) + 0.5
        from_x = tl.load(factors) * x + tl.load(factors + 1) * y + tl.load(factors + 2)
        from_y = tl.load(factors + 3) * x + tl.load(factors + 4) * y + tl.load(factors + 5)
        seen = inside & (from_x >= 0) & (from_x < side) & (from_y >= 0) & (from_y < side)
        # a place far outside has no integer
        from_x, from_y = tl.where(seen, from_x, 0.0) - 0.5, tl.where(seen, from_y, 0.0) - 0.5
        left, top = tl.floor(from_x), tl.floor(from_y)
        dx, dy = from_x - left, from_y - top
        c, r = left.to(tl.int32) - 1, top.to(tl.int32) - 1
        for channel in tl.static_range(3):
            v1 = _row(images, base, r, c, side, flips, seen, channel, dx)
            v2 = _row(images, base, r + 1, c, side, flips, seen, channel, dx)
            v3 = _row(images, base, r + 2, c, side, flips, seen, channel, dx)
            v4 = _row(images, base, r + 3, c, side, flips, seen, channel, dx)
            value = _byte(_cubic(v1, v2, v3, v4, dy))
            fill = fill_red if channel == 0 else (fill_green if channel == 1 else fill_blue)
            tl.store(out + base + at * 3 + channel, tl.where(seen, value, fill).to(tl.uint8), mask=inside)
    elif code == SHARPNESS:
        factor = tl.load(factors).to(tl.float32)
        middle = (row > 0) & (row < side - 1) & (column > 0) & (column < side - 1)
        for channel in tl.static_range(3):
            value = tl.load(here + channel, mask=inside, other=0).to(tl.int32)
            total = 4 * value
            for i in tl.static_range(-1, 2):
                for j in tl.static_range(-1, 2):
                    near = _pixel(images, base, row + i, column + j, side, flips) + channel
                    total += tl.load(near, mask=inside, other=0).to(tl.int32)
            blurred = (2 * total + 13) // 26  # rounded
            sharp = _byte((value - blurred).to(tl.float32) * factor + blurred.to(tl.float32))
            tl.store(out + base + at * 3 + channel, tl.where(middle, sharp, value).to(tl.uint8), mask=inside)
    else:
        red = tl.load(here, mask=inside, other=0).to(tl.int32)
        green = tl.load(here + 1, mask=inside, other=0).to(tl.int32)
        blue = tl.load(here + 2, mask=inside, other=0).to(tl.int32)
        if code == COLOR:
            factor, grey = tl.load(factors), _grey(red, green, blue)
            red, green, blue = _blend(grey, red, factor), _blend(grey, green, factor), _blend(grey, blue, factor)
        elif code == IS_TABLE:
            table = noted + place * BYTES + TABLE
            red = tl.load(table + red).to(tl.int32)
            green = tl.load(table + green).to(tl.int32)
            blue = tl.load(table + blue).to(tl.int32)
        elif code > 0:
            table = tables + image * 3 * 256
            red = tl.load(table + red).to(tl.int32)
            green = tl.load(table + 256 + green).to(tl.int32)
            blue = tl.load(table + 512 + blue).to(tl.int32)
        tl.store(out + base + at * 3, red.to(tl.uint8), mask=inside)
        tl.store(out + base + at * 3 + 1, green.to(tl.uint8), mask=inside)
        tl.store(out + base + at * 3 + 2, blue.to(tl.uint8), mask=inside)


@torch.library.custom_op("cait::augment", mutates_args=())
def augment(images: Tensor, steps: Tensor, red: int, green: int, blue: int) -> Tensor:
    """Do the steps, uint8 [B, steps · 312], on images uint8 [B, S, S, 3]; the colour is around warped images."""
    batch, side = images.shape[:2]
    count = steps.shape[1] // STEP.itemsize
    codes, amounts = steps.view(torch.int32), steps.view(torch.float64)
    tables = torch.empty(batch, 3, 256, dtype=torch.uint8, device=images.device)
    images = images.contiguous()
    exact = dict(enable_fp_fusion=False)
    how = dict(BLOCK=PIXELS, num_warps=WARPS, **exact)
    grid, fill = (triton.cdiv(side * side, PIXELS), batch), (red, green, blue)
    spare = None
    for step in range(count):
        # The batch's own memory is not written to: it may be the loader's.
        out = torch.empty_like(images) if spare is None else spare
        where = (step, count, side)
        _tables[(batch, 3)](images, codes, amounts, tables, *where, BLOCK=BLOCK, **exact)
        _apply[grid](images, out, codes, amounts, steps, tables, *where, *fill, **how)
        spare, images = (images if step else None), out
    return images


@augment.register_fake
def _(images: Tensor, steps: Tensor, red: int, green: int, blue: int) -> Tensor:
    return torch.empty_like(images)
