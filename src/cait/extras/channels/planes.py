"""`--data.reader cait.extras.channels.planes:read`: the numbers of .npy, TIFF, DICOM and PNG files as they are.

Whole numbers are divided by the largest of their type. Others stay as they are, and DICOM's are in its own units.
"""

import lzma
import math
import zlib
from collections import ChainMap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor
from torchvision.io import decode_image

from cait.data.reading import (
    MOST_BYTES,
    UnreadableImageError,
    check_size,
    load_image,
    open_bytes,
    open_image,
)
from cait.disk import TOO_MUCH, most_bytes
from cait.errors import UserError, tell_once, to_install
from cait.extras.channels.preprocessing import PlanesReading
from cait.extras.features import evenly

SAMPLE = 500
"""Training images that are read for their mean, evenly over all."""
MOST = np.float32(1e30)
"""Larger numbers stand for none, as GDAL's -3.4e38, netCDF's 9.97e36 and infinity; their squares would be no float."""
MOST_PAGES = 10_000
"""Pages of a TIFF file that are read: each takes time, however small it is."""
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""How a TIFF file begins; the last two are of BigTIFF."""
PALETTE = "its colors are in a palette"
GDAL_NODATA = 42113
"""The tag of a TIFF file for the value that stands for none."""


def read(image: Any, reading: PlanesReading) -> Tensor:
    """Planes of a path or an open file, as `PlanesReading.reader` says. Raises any kind of error."""
    with open_bytes(image) as file:
        arguments: Any = {"upright": reading.exif_orientation} | (reading.reader_args or {})
        pixels = numbers(file.read(MOST_BYTES), reading.in_chans, **arguments)
    planes: Any = torch.from_numpy(pixels).permute(2, 0, 1)
    while reading.shrinks(planes.shape[1:]):
        planes = F.avg_pool2d(planes, 2)
    return planes


def numbers(
    data: bytes,
    in_chans: int,
    bands: Sequence[int] | None = None,
    nodata: float | None = None,
    window: Sequence[float] | str | None = None,
    upright: bool = True,
) -> ndarray:
    """The numbers in a file as float32 [height, width, channels], NaN where one is missing or beyond `MOST`.

    Raises any kind of error.

    Args:
        in_chans: the channels of an array, if its first and its last axis may be them; otherwise the shorter one is.
        bands: the channels to take, from 0 on; None takes all.
        nodata: a value that stands for none, beside the file's own.
        window: of DICOM, its center and width, or "file" for what the file says.
        upright: turn PNG and JPEG as their EXIF data say.
    """
    missing = None
    if data[128:132] == b"DICM":  # first: what precedes it may look like TIFF
        pixels = _dicom(data, window)
    elif data.startswith(TIFF):
        pixels, missing = _tiff(data)
    elif data.startswith(b"\x93NUMPY"):
        pixels = np.atleast_3d(np.load(BytesIO(data), allow_pickle=False))
        first, *_, last = pixels.shape
        if last != in_chans and (first == in_chans or first < last):
            pixels = np.moveaxis(pixels, 0, -1)
    else:
        # Pillow has the bounds; torchvision decodes, because Pillow cuts colors to 8 bits.
        with open_image(BytesIO(data)) as opened:
            if (
                opened.mode == "P" or opened.format == "GIF"
            ):  # of a GIF torchvision takes all images
                raise ValueError(PALETTE)
            _check_count(opened.width * opened.height * len(opened.getbands()), data)
            if opened.format == "PNG":
                opened.load()  # of a damaged one torchvision ends the process
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels = decode_image(encoded, "UNCHANGED", upright).permute(1, 2, 0).numpy()
    if pixels.ndim != 3 or pixels.dtype.kind not in "biuf":
        raise ValueError(
            f"it holds {pixels.dtype} of shape {pixels.shape}, not numbers, height × width × channels"
        )
    check_size(*pixels.shape[1::-1])
    _check_count(pixels.size, data)
    most = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity
        planes = (pixels / most).astype(np.float32)
    for value in (nodata, missing):
        planes[(np.abs(planes) > MOST) | (pixels == value)] = np.nan
    return planes if bands is None else planes[..., [*bands]]


def _check_count(count: int, data: bytes) -> None:
    """Raise ValueError if so many numbers are too many for a file, before they are unpacked."""
    if 4 * count > most_bytes(len(data)):
        raise ValueError(f"its {count:,} numbers {TOO_MUCH}")


def _unpack(decoder: Any, data: bytes, most: int | None) -> bytes:
    """At most so many bytes of what is packed. A strip of TIFF's may hold more than its image has."""
    return decoder.decompress(data, most or most_bytes(len(data)))


def _unpack_bits(data: bytes, most: int | None) -> bytes:
    """`_unpack` for PackBits: n and n + 1 bytes, or 257 - n and a byte to repeat."""
    most = most or most_bytes(len(data))
    unpacked = bytearray()
    position = 0
    while position < len(data) and len(unpacked) < most:
        head = data[position]
        size = 1 if head > 128 else head + 1 if head < 128 else 0
        literal = data[position + 1 : position + 1 + size]
        unpacked += literal * (257 - head) if head > 128 else literal
        position += 1 + size
    return bytes(unpacked)


@cache
def _bound_tifffile() -> None:
    """Have tifffile unpack no more of a strip than the image needs. imagecodecs, if it is there, does so itself."""
    from tifffile import TIFF

    if find_spec("imagecodecs"):
        return
    bounded: dict[int, Any] = {32773: lambda data, out=None: _unpack_bits(data, out)}
    for code in (8, 32946, 50013):
        bounded[code] = lambda data, out=None: _unpack(zlib.decompressobj(), data, out)
    bounded[34925] = lambda data, out=None: _unpack(
        lzma.LZMADecompressor(memlimit=most_bytes(0)), data, out
    )
    with suppress(ImportError):  # since Python 3.14
        from compression.zstd import ZstdDecompressor  # type: ignore[import-not-found]

        bounded[50000] = lambda data, out=None: _unpack(ZstdDecompressor(), data, out)
    TIFF.DECOMPRESSORS = ChainMap(bounded, TIFF.DECOMPRESSORS)


def _tiff(data: bytes) -> tuple[ndarray, Any]:
    """The planes of a TIFF file, interleaved, one after the other or a page each, and its value for none."""
    from tifffile import PHOTOMETRIC, TiffFile

    _bound_tifffile()
    with TiffFile(BytesIO(data)) as opened:
        if len(opened.pages) > MOST_PAGES:
            raise ValueError(f"its {len(opened.pages):,} pages are more than {MOST_PAGES:,}")
        series = opened.series[0]  # others are smaller copies
        _check_count(max(series.size, math.prod(series.keyframe.chunks)), data)
        pixels = np.moveaxis(series.asarray(), [series.axes.index(axis) for axis in "YX"], [0, 1])
        page = series.keyframe
        if page.photometric == PHOTOMETRIC.PALETTE:
            raise ValueError(PALETTE)
        if page.photometric == PHOTOMETRIC.MINISWHITE and pixels.dtype.kind == "u":
            pixels = np.iinfo(pixels.dtype).max - pixels
        return np.atleast_3d(pixels), page.nodata if GDAL_NODATA in page.tags else None


def _dicom(data: bytes, window: Any) -> ndarray:
    """A DICOM image, its frames as channels: rescaled, windowed if asked for, bright where a viewer shows it bright."""
    from pydicom import dcmread
    from pydicom.pixels import apply_modality_lut, apply_windowing

    _check_inflated(data)
    image = dcmread(BytesIO(data))
    frames = int(image.get("NumberOfFrames") or 1)
    _check_count(image.Columns * image.Rows * image.SamplesPerPixel * frames, data)
    if image.PhotometricInterpretation == "PALETTE COLOR":
        raise ValueError(PALETTE)
    stored = image.pixel_array
    values = apply_modality_lut(stored, image)
    if window is not None:
        if window != "file":
            image.WindowCenter, image.WindowWidth = window
        elif "WindowCenter" not in image:
            raise ValueError("it has no window")
        values = apply_windowing(values, image)
    if image.PhotometricInterpretation == "MONOCHROME1":  # the least number is white
        least = -(2 ** (image.BitsStored - 1)) if image.PixelRepresentation else 0
        values = (
            apply_modality_lut(np.array([least, least + 2**image.BitsStored - 1]), image).sum()
            - values
        )
    values = np.where(stored == image.get("PixelPaddingValue"), np.nan, values)
    if values.ndim == 3 and image.SamplesPerPixel == 1:
        values = np.moveaxis(values, 0, -1)
    return np.atleast_3d(values)


def _check_inflated(data: bytes) -> None:
    """Raise ValueError if what follows the head of a DICOM file is packed, and far larger than the file."""
    from pydicom.filereader import _read_file_meta_info, read_preamble

    file: Any = BytesIO(data)
    read_preamble(file, force=False)
    head = _read_file_meta_info(file)
    if "TransferSyntaxUID" in head and head.TransferSyntaxUID.is_deflated:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        decoder.decompress(file.read(), most_bytes(len(data)))
        if decoder.unconsumed_tail:
            raise ValueError(f"its content {TOO_MUCH}")


def measure(samples: Any, reading: PlanesReading) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, of a sample without its missing numbers; a line says what was found.

    The channels are `reading.in_chans`, or if that is 0 those of the first image. Raises UserError if none can be read.
    """
    read = pixels = 0
    problems: list[str] = []
    totals: Any = (
        0  # numbers that are not missing, their sum and that of their squares, for each channel
    )
    for index in evenly(len(samples), SAMPLE):
        try:
            planes = load_image(samples[index][0], samples.name(index), reading)
        except UnreadableImageError as error:
            problems.append(str(error))
            continue
        reading = replace(reading, in_chans=len(planes))
        read += 1
        pixels += planes.numel()
        values = planes.flatten(1).double()
        totals += torch.stack([(~values.isnan()).sum(1), values.nansum(1), (values**2).nansum(1)])
    if not read:
        remedy = (
            f"; TIFF and DICOM need {to_install('[channels]')}"
            if "No module" in problems[0]
            else ""
        )
        raise UserError(f"no training image can be read as planes: {problems[0]}{remedy}")
    mean, squares = totals[1:] / totals[0].clamp(min=1)
    std = (squares - mean**2).clamp(min=0).sqrt()
    std[std <= 1e-6 * mean.abs()] = 1  # of a channel that is the same everywhere
    lines = [
        f"planes    {len(mean)} channels, mean and deviation of {read:,} of {len(samples):,} training images"
    ]
    if missing := pixels - int(totals[0].sum()):
        lines.append(
            f"{missing:,} numbers ({missing / pixels:.1%}) are missing and count as the mean"
        )
    tell_once("; ".join([*lines, *problems[:3]]))
    return mean.tolist(), std.tolist()
