"""Files of planes, made in memory."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest

tifffile = pytest.importorskip("tifffile")
DRAWN = np.random.default_rng(0)
FIVE = DRAWN.integers(0, 2**16, (6, 9, 5), dtype=np.uint16)
"""Five channels, uint16 [height, width, channels]."""


def tiff(planes, **settings):
    file = BytesIO()
    how = {"photometric": "minisblack", "planarconfig": "contig"} | settings
    tifffile.imwrite(file, planes, **how)
    return file.getvalue()


def packed_tiff(compression, packed, **settings):
    """A TIFF file of 10 × 10 pixels in one strip, or in tiles, whose content is given."""
    data = tiff(iter([packed]), shape=(10, 10), dtype="uint8", compression="zlib", **settings)
    written, wanted = (struct.pack("<HHIH", 259, 3, 1, code) for code in (8, compression))
    assert written in data
    return data.replace(written, wanted)


def npy(planes):
    file = BytesIO()
    np.save(file, planes)
    return file.getvalue()


def png(planes, line_filter=b"\0"):
    """A PNG file of 16 bits, of uint16 [height, width, 1 or 3]; Pillow writes none in color."""
    height, width, channels = planes.shape
    color = 0 if channels == 1 else 2
    header = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    lines = b"".join(line_filter + line.astype(">u2").tobytes() for line in planes)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        tagged = kind + content
        file += struct.pack(">I", len(content)) + tagged + struct.pack(">I", zlib.crc32(tagged))
    return file
