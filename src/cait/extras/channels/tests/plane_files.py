"""Files of planes, made in memory."""

import struct
from io import BytesIO
from pathlib import Path

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


def dicom(name):
    """A DICOM file that pydicom has for its own tests: the path, and what pydicom reads."""
    pydicom = pytest.importorskip("pydicom")
    path = Path(pydicom.__file__).parent / f"data/test_files/{name}.dcm"
    return path, pydicom.dcmread(path)


def npy(planes):
    file = BytesIO()
    np.save(file, planes)
    return file.getvalue()
