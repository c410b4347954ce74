"""Pictures of which a box is decoded when it is wanted, by the fastest decoder that there is.

The decoders give the same pixels, so which of them a run has does not change it. They are for JPEG
files; all else, and every file that they decline, is left to Pillow.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from cait.data.folder import Source, load_rgb
from cait.errors import UserError

Decoder = Literal["nvimgcodec", "torchvision", "pillow"]
Box = tuple[int, int, int, int]
"""top, left, height, width, in pixels"""

JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
BASELINE = (0xC0, 0xC1)
FRAMES = {0xC0 + number for number in range(16)} - {0xC4, 0xC8, 0xCC}
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")  # other than those that restart a scan

# Past MAX_IMAGE_PIXELS, 89 million, Pillow warns, and from twice that on it refuses, which will do.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class Picture(Protocol):
    """A picture in RGB."""

    size: tuple[int, int]
    """(width, height) in pixels"""

    def crop(self, box: Box) -> np.ndarray:
        """The pixels of the box, uint8 [height, width, 3]. Raises UserError where they cannot be decoded."""
        ...


class Decoded:
    """A picture in memory, uint8 [height, width, 3]."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.size = pixels, (pixels.shape[1], pixels.shape[0])

    def crop(self, box: Box) -> np.ndarray:
        top, left, height, width = box
        return self.pixels[top : top + height, left : left + width].copy()


class JpegStream:
    """A JPEG file, of which nvImageCodec decodes the box alone.

    Raises:
        RuntimeError: it is not one that nvImageCodec reads.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        self.codec, self.decoder, self.params = nvimgcodec(os.getpid())
        self.stream = self.codec.CodeStream(data)
        self.size = (self.stream.width, self.stream.height)

    def crop(self, box: Box) -> np.ndarray:
        top, left, height, width = box
        right = min(max(left + width, 2), self.size[0])  # the first column alone may come out another
        region = self.codec.Region(top, left, top + height, right)
        image = self.decoder.decode(self.stream.get_sub_code_stream(region=region), params=self.params)
        if image is None:
            return _by_pillow(BytesIO(self.data), self.name).crop(box)
        return np.asarray(image)[:, :width]


def open_picture(source: Source, name: str, whole: bool, decoder: Decoder) -> Picture:
    """Open a picture, of which one box is wanted, or several (`whole`): then it is decoded once.

    Args:
        name: what the picture is called in errors, where it is no file.

    Raises:
        UserError: the picture cannot be read.
    """
    if decoder == "pillow" or isinstance(source, Image.Image):
        return _by_pillow(source, name)
    if isinstance(source, str | Path):
        name = str(source)
    try:
        with open(source, "rb") if isinstance(source, str | Path) else source as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"cannot read the picture {name}: {error.strerror}") from error
    # Of a file that was cut short a box above the cut could be decoded; Pillow refuses it whatever the box.
    if data.startswith(JPEG_START) and data.endswith(JPEG_END):
        try:
            picture = _fast(data, name, decoder)
            width, height = picture.size
            return Decoded(picture.crop((0, 0, height, width))) if whole else picture
        except Exception:  # of many kinds; Pillow decides
            pass
    return _by_pillow(BytesIO(data), name)


def _by_pillow(source: Source, name: str) -> Decoded:
    return Decoded(np.asarray(load_rgb(source, name)))


def _fast(data: bytes, name: str, decoder: Decoder) -> Picture:
    """Raises an error of any kind where Pillow must decide."""
    kind, components, pixels, scan = _header(data)
    if pixels > 2 * (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError("Pillow refuses so large a picture")
    # nvImageCodec's RGB of CMYK is another, and a progressive file that lacks its last scans it smooths otherwise in a
    # box. Nor does it see damage that it does not come upon: a marker within the scan, which must be last in the file.
    if decoder == "nvimgcodec" and kind in BASELINE and components in (1, 3):
        marker = MARKER.search(data, scan)
        if marker and marker.start() == len(data) - len(JPEG_END):
            return JpegStream(data, name)
    tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return Decoded(tensor.permute(1, 2, 0).numpy())


def _header(data: bytes) -> tuple[int, int, int, int]:
    """(the frame's marker, its components, width × height, where the scan begins); any error where there is none."""
    place, kind, components, pixels = 2, 0, 0, 0
    while True:
        start, marker = data[place], data[place + 1]
        if start != 0xFF:
            raise ValueError("no marker where one should be")
        if marker in FRAMES:
            kind, components = marker, data[place + 9]
            pixels = int.from_bytes(data[place + 5 : place + 7]) * int.from_bytes(data[place + 7 : place + 9])
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
        if marker == 0xDA:  # start of scan
            return kind, components, pixels, place


def choose(wanted: Decoder | None) -> Decoder:
    """The decoder that is wanted; None takes nvImageCodec where it is installed and works, else torchvision's.

    Raises:
        UserError: nvImageCodec is wanted and does not work here.
    """
    if wanted is None or wanted == "nvimgcodec":
        try:
            nvimgcodec(os.getpid())
        except (ImportError, RuntimeError) as error:
            if wanted:
                raise UserError(
                    f"data.backend nvimgcodec does not work here: {error}; "
                    "install nvidia-nvimgcodec-cu13, or take torchvision, which gives the same pixels"
                ) from error
            return "torchvision"
    return wanted or "nvimgcodec"


@cache
def nvimgcodec(process: int) -> tuple[Any, Any, Any]:
    """nvImageCodec, a decoder of it that runs on one core, and its settings; for each process its own.

    Raises:
        ImportError, RuntimeError: it is not installed, or does not work on this machine.
    """
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # what is wrong with a picture is ours to tell
    with _silence():
        from nvidia import nvimgcodec

        decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
        )
    return nvimgcodec, decoder, nvimgcodec.DecodeParams(apply_exif_orientation=False)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep stderr closed: on import nvImageCodec names the GPU libraries that it does not find, none of them wanted."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
