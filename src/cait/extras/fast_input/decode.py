"""Decode only the crop of an image, with the fastest decoder that is installed.

All decoders give the same pixels, so the choice does not change a run. The fast ones read JPEG files, and PPM files as
they are. Pillow reads all other files, and every file that the fast ones decline.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from cait.data.reading import (
    AS_SEEN,
    DECODING,
    OPENING,
    PADDING,
    PUBLISHED,
    RawImage,
    Reading,
    UnreadableImageError,
    check_scans,
    check_size,
    load_image,
    open_bytes,
    orientation,
)
from cait.data.reading import open_image as open_picture

Decoder = Literal["nvimgcodec", "torchvision"]
Box = tuple[int, int, int, int]
"""top, left, height, width, in pixels"""
Size = tuple[int, int]
"""width, height"""

JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
BASELINE = (0xC0, 0xC1)
FRAMES = {0xC0 + number for number in range(16)} - {0xC4, 0xC8, 0xCC}
APP1 = 0xE1
"""Marker of the segments that hold EXIF and XMP data."""
SEGMENT, FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")
"""0xff, marker and length of a segment; height, width and components of a frame."""
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")  # except markers that restart a scan
PPM = re.compile(rb"P6\n(\d{1,9}) (\d{1,9})\n255\n")
"""Header of a PPM file, as Pillow writes it."""


class Frame(NamedTuple):
    """What the header of a file says."""

    kind: int
    """Marker of the frame."""
    components: int
    width: int
    height: int
    scan: int
    """Where the first scan starts."""
    has_exif: bool
    """Whether there may be EXIF data."""
    scans: bool = False
    """Whether there may be several scans."""


class DecodedImage:
    """An image in memory, uint8 [height, width, 3]; its `size` is (width, height)."""

    def __init__(self, pixels: ndarray) -> None:
        self.pixels, self.size = pixels, (pixels.shape[1], pixels.shape[0])

    def crop(self, box: Box) -> ndarray:
        """The pixels of the box, uint8 [height, width, 3], the caller's own."""
        top, left, height, width = box
        return self.pixels[top : top + height, left : left + width].copy()


class JpegStream:
    """A JPEG file; nvImageCodec decodes only the box. Raises RuntimeError if nvImageCodec does not read this file."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        self.codec, self.decoder, self.params = nvimgcodec(os.getpid())
        self.stream = self.codec.CodeStream(data)
        self.size = (self.stream.width, self.stream.height)

    def crop(self, box: Box) -> ndarray:
        top, left, height, width = box
        # a region of only the first column may come out wrong
        right = min(max(left + width, 2), self.size[0])
        image = self.decoder.decode(
            self.stream.get_sub_code_stream(
                region=self.codec.Region(top, left, top + height, right)
            ),
            params=self.params,
        )
        if image is None:
            return _by_pillow(BytesIO(self.data), self.name, PUBLISHED).crop(box)
        return np.asarray(image)[:, :width]


class Upright:
    """An image, as it lies in the file, whose EXIF orientation, 1 to 8, is applied to each box."""

    def __init__(self, stored: OpenImage, orientation: int) -> None:
        self.stored = stored
        self.transposed = orientation in (5, 6, 7, 8)
        self.up_down = orientation in (3, 4, 6, 7)  # of the stored image
        self.left_right = orientation in (2, 3, 7, 8)
        self.size: Size = stored.size[::-1] if self.transposed else stored.size

    def crop(self, box: Box) -> ndarray:
        top, left, height, width = box
        if self.transposed:
            top, left, height, width = left, top, width, height
        if self.up_down:
            top = self.stored.size[1] - top - height
        if self.left_right:
            left = self.stored.size[0] - left - width
        pixels = self.stored.crop((top, left, height, width))
        pixels = pixels[:: -1 if self.up_down else 1, :: -1 if self.left_right else 1]
        return (pixels.swapaxes(0, 1) if self.transposed else pixels).copy()


class Gray:
    """An image whose boxes are gray, as Pillow makes them; the channels are equal."""

    def __init__(self, colored: OpenImage) -> None:
        self.colored = colored
        self.size: Size = colored.size

    def crop(self, box: Box) -> ndarray:
        return np.array(Image.fromarray(self.colored.crop(box)).convert("L").convert("RGB"))


OpenImage = DecodedImage | JpegStream | Upright | Gray
"""An opened RGB image; its boxes can be decoded."""


def open_image(
    raw: RawImage, name: str, whole: bool, decoder: Decoder, reading: Reading = AS_SEEN
) -> OpenImage:
    """Open an image for one crop, or decode it `whole`, once, for several.

    Raises UnreadableImageError if the image cannot be read; it has the `name` of an image that has no path.
    """
    if isinstance(raw, Image.Image):
        return _by_pillow(raw, name, reading)
    if isinstance(raw, str | Path):
        name = str(raw)
    try:
        with open_bytes(raw) as file:
            # read(n) would take n bytes of memory first, whatever there is
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size > DECODING[1]:  # Pillow reads what it needs of it
                return _by_pillow(file, name, reading)
            data = file.read()
    except OSError as error:
        raise UnreadableImageError(
            f"cannot read the image {name}: {error.strerror or error}"
        ) from error
    # A decoder could read a box above the point where a file is cut off. Pillow refuses such a file, so we do too.
    if PPM.match(data) or (data.startswith(JPEG_START) and data.endswith(JPEG_END)):
        try:
            image = _fast(data, name, decoder, reading)
            if reading.in_chans == 1:
                image = Gray(image)
            return DecodedImage(image.crop((0, 0, *image.size[::-1]))) if whole else image
        except Exception:  # of any kind; Pillow decides
            pass
    return _by_pillow(BytesIO(data), name, reading)


def _by_pillow(raw: RawImage, name: str, reading: Reading) -> DecodedImage:
    return DecodedImage(np.asarray(load_image(raw, name, reading)))


def _fast(data: bytes, name: str, decoder: Decoder, reading: Reading) -> OpenImage:
    """Raises any kind of error if Pillow must decide."""
    ppm = PPM.match(data)
    frame = (
        Frame(0, 3, int(ppm[1]), int(ppm[2]), ppm.end(), has_exif=False) if ppm else _header(data)
    )
    if reading.shrinks((frame.width, frame.height)):
        raise ValueError("Pillow shrinks while it decodes, which is faster still")
    check_size(frame.width, frame.height)
    if ppm:
        pixels = np.frombuffer(data, np.uint8, 3 * frame.width * frame.height, frame.scan)
        return DecodedImage(pixels.reshape(frame.height, frame.width, 3))
    image = _stored(data, name, decoder, frame)
    if reading.exif_orientation and frame.has_exif:
        with open_picture(BytesIO(data)) as header:
            turned = orientation(header)
        if turned != 1:
            return Upright(image, turned)
    return image


def _stored(data: bytes, name: str, decoder: Decoder, frame: Frame) -> OpenImage:
    """The image as it lies in the file."""
    # nvImageCodec converts CMYK to another RGB, and smooths a box differently if a progressive file lacks its last
    # scans. It misses damage outside the box, so the scan must reach the end of the file without a marker.
    common = frame.kind in BASELINE and frame.components in (1, 3)
    if decoder == "nvimgcodec" and common and _is_one_scan(data, frame.scan):
        return JpegStream(data, name)
    if frame.scans:
        check_scans(data)
    if PADDING in data:
        raise ValueError("Pillow refuses it")
    tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return DecodedImage(tensor.permute(1, 2, 0).numpy())


def _is_one_scan(data: bytes, start: int) -> bool:
    """Whether no marker follows before that of the end, except those that restart a scan."""
    end = len(data) - len(JPEG_END)
    scan = np.frombuffer(data, np.uint8)[start:]
    # numpy takes half the time of the search, but also finds the markers that restart a scan.
    marked = scan[:-1] == 0xFF
    marked &= scan[1:] != 0
    if marked.any() and start + marked.argmax() == end:
        return True
    marker = MARKER.search(data, start)
    return marker is not None and marker.start() == end


def _header(data: bytes) -> Frame:
    """The header of a JPEG file; raises any error without one."""
    start = 2
    frame = components = width = height = 0
    has_exif = False
    for _ in range(OPENING[0]):
        mark, marker, size = SEGMENT.unpack_from(data, start)
        if mark != 0xFF:
            raise ValueError("no marker where one should be")
        end = start + 2 + size
        has_exif |= marker == APP1
        if marker in FRAMES:
            frame = marker
            height, width, components = FRAME.unpack_from(data, start + 5)
        if marker == 0xDA:  # start of scan
            has_several = frame not in BASELINE or data[start + 4] != components
            return Frame(frame, components, width, height, end, has_exif, has_several)
        start = end
    raise ValueError("it has far more segments than an image needs")


def choose() -> Decoder:
    """nvImageCodec if it works here, otherwise torchvision."""
    try:
        nvimgcodec(os.getpid())
    except (ImportError, RuntimeError):
        return "torchvision"
    return "nvimgcodec"


@cache
def nvimgcodec(process: int) -> tuple[Any, Any, Any]:
    """nvImageCodec, a decoder on one core, and its settings; each process has its own.

    Raises ImportError, RuntimeError if it is not installed, or does not work on this machine.
    """
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # we report unreadable images ourselves
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
    """Silence stderr: on import nvImageCodec names the GPU libraries that it misses, and none of them is needed."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
