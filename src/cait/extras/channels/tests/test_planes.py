"""Planes: read to the bit beside the libraries' own readers, within bounds, and prepared as timm prepares images."""

import lzma
import tracemalloc
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded_image import encoded
from harness import over_table, parsed
from PIL import ExifTags, Image
from plane_files import DRAWN, FIVE, dicom, npy, packed_tiff, tiff
from timm.data import create_transform

import cait
from cait import plain
from cait.data import datamodule
from cait.data.dataset import seed_generators
from cait.data.transforms import Preprocessing
from cait.errors import UserError
from cait.extras.channels import READER, planes, settings_for
from cait.extras.channels.planes import numbers, read
from cait.extras.channels.preprocessing import Planes, PlanesReading

PNG = parsed(Path(__file__).with_name("files.yaml"))
COLORS = np.array(PNG["numbers"], np.uint16)
FLOATS = FIVE / np.float32(7)
PAGES = np.moveaxis(FIVE, 2, 0)
HALVES = (FIVE // 9).astype(np.float16)[..., 0]
BYTES = (FIVE // 256).astype(np.uint8)
GRAY = BYTES[..., 0]

FILES = {
    "interleaved, 16 bits": (tiff(FIVE), FIVE),
    "planar, 8 bits": (tiff(np.moveaxis(BYTES, 2, 0), planarconfig="separate"), BYTES),
    "compressed floats, big-endian": (tiff(FLOATS, compression="zlib", byteorder=">"), FLOATS),
    "a page for each channel": (tiff(PAGES, planarconfig=None), FIVE),
    "channels last": (npy(FIVE), FIVE),
    "channels first": (npy(PAGES), FIVE),
    "more channels than pixels": (npy(FIVE.swapaxes(1, 2)), FIVE.swapaxes(1, 2)),
    "one channel, half floats": (npy(HALVES), HALVES),
    "PNG in color": (PNG["in color"], COLORS),
    "gray PNG": (encoded(Image.fromarray(PAGES[0]), "PNG"), PAGES[0]),
    "white is zero": (tiff(GRAY, photometric="miniswhite"), 255 - GRAY),
}


@pytest.mark.parametrize("kind", FILES)
def test_numbers_are_those_of_the_file(kind):
    data, expected = FILES[kind]
    expected = np.atleast_3d(expected)
    most = np.iinfo(expected.dtype).max if expected.dtype.kind == "u" else 1
    found = numbers(data, in_chans=expected.shape[2])
    assert np.array_equal(found, (expected / most).astype(np.float32))


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_float32_is_missing():
    found = numbers(npy(np.array([[[1e300, 2.0]]])), 2)
    assert np.array_equal(found, [[[np.nan, 2.0]]], equal_nan=True)


@over_table(__file__, "turned")
def test_a_png_is_turned_as_its_exif_data_say(upright, shape):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encoded(Image.fromarray(GRAY), "PNG", exif=exif)
    reading = PlanesReading(upright, reader=READER, in_chans=1)
    assert [*read(BytesIO(data), reading).shape] == shape


# DICOM

CASES = """
    CT_small MR_small MR_small_RLE MR_small_bigendian JPEG2000 SC_rgb_rle_16bit liver_1frame image_dfl
"""


@pytest.mark.parametrize("name", CASES.split())
def test_dicom_is_as_pydicom_rescales_it(name):
    path, image = dicom(name)
    slope = float(image.get("RescaleSlope", 1))
    expected = image.pixel_array * slope + float(image.get("RescaleIntercept", 0))
    found = numbers(path.read_bytes(), 1)
    assert np.array_equal(found, np.atleast_3d(expected).astype(np.float32))


def test_a_window_the_least_number_as_white_and_padding():
    path, image = dicom("CT_small")
    stored = image.pixel_array.astype(int)
    stored[0, 0] = image.PixelPaddingValue
    image.PixelData = stored.astype(np.int16).tobytes()
    image.PhotometricInterpretation = "MONOCHROME1"
    image.save_as(file := BytesIO())
    missing = stored == image.PixelPaddingValue
    intercept = int(image.RescaleIntercept)
    whole = numbers(file.getvalue(), 1)[..., 0]
    # the ends of 16 bits add up to -1
    expected = np.where(missing, np.nan, intercept - 1 - stored)
    np.testing.assert_array_equal(whole, expected)
    windowed = numbers(file.getvalue(), 1, window=[40, 400])[..., 0]
    is_above = stored + intercept >= 40 - 0.5 + 399 / 2  # PS3.3 C.11.2.1.2.1
    assert np.array_equal(windowed == np.nanmin(windowed), is_above & ~missing)
    with pytest.raises(ValueError, match="no window"):
        numbers(path.read_bytes(), 1, window="file")


def deflated_dicom():
    """A DICOM file whose content is deflated, with 4 MB of zeros in a private element."""
    _, image = dicom("CT_small")
    image.file_meta.TransferSyntaxUID = (
        "1.2.840.10008.1.2.1.99"  # Deflated Explicit VR Little Endian
    )
    image.add_new((0x7FE1, 0x1010), "OB", bytes(1 << 22))
    image.save_as(file := BytesIO())
    return file.getvalue()


# Bounds

ZEROS = bytes(1 << 24)
PACKED = {
    "deflate": (8, zlib.compress),
    "lzma": (34925, partial(lzma.compress, preset=0)),
    "packbits": (32773, lambda zeros: b"\x81\0" * (len(zeros) >> 7)),
}


@pytest.mark.parametrize("kind", PACKED)
def test_no_more_of_a_strip_is_unpacked_than_its_image_has(kind):
    code, pack = PACKED[kind]
    data = packed_tiff(code, pack(ZEROS))
    assert numbers(data, 1).shape == (10, 10, 1)  # what is imported stays
    tracemalloc.start()
    numbers(data, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(ZEROS) / 4


TOO_MUCH = "far more memory"
ANIMATION = dict(save_all=True, append_images=[Image.fromarray(255 - GRAY)])
COLORED = dict(photometric="palette", colormap=np.zeros((3, 256), np.uint16))
BLACK = np.zeros((900, 900, 5), np.uint8)
REFUSED = {
    "deflated DICOM": (deflated_dicom, TOO_MUCH),
    "a tile": (packed_tiff(8, zlib.compress(bytes(99)), tile=(60_000, 60_000)), TOO_MUCH),
    "an image": (tiff(BLACK, compression="zlib"), TOO_MUCH),
    "PNG": (encoded(Image.fromarray(BLACK[..., 0]), "PNG"), TOO_MUCH),
    "pages": (tiff(BLACK[:60, :2, :2], planarconfig=None), "60 pages"),
    "an animation": (encoded(Image.fromarray(GRAY), "GIF", **ANIMATION), "palette"),
    "a palette in PNG": (encoded(Image.fromarray(GRAY).convert("P"), "PNG"), "palette"),
    "a palette in TIFF": (tiff(GRAY, **COLORED), "palette"),
    "a PNG with which torchvision would end the process": (PNG["damaged"], "data stream"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_file_takes_is_known_before_it_is_unpacked(kind, monkeypatch):
    monkeypatch.setattr(plain, "FLOOR", 1 << 20)
    monkeypatch.setattr(planes, "MOST_PAGES", 50)
    data, reason = REFUSED[kind]
    data = data if isinstance(data, bytes) else data()
    with pytest.raises((ValueError, OSError), match=reason):
        numbers(data, 1)


# Settings and transforms


def test_without_the_extra_a_run_of_planes_is_refused(monkeypatch):
    data = cait.ImageNetDataModule(img_size=8)
    state = {"preprocessing": {"reader": READER}}
    data.check_prepares(state)
    monkeypatch.setattr(datamodule, "PREPARATION", Preprocessing)
    with pytest.raises(UserError, match=READER):
        data.check_prepares(state)


def test_missing_numbers_are_counted_and_become_the_mean(tmp_path, capfd):
    values = DRAWN.random((8, 8, 5), np.float32)
    values[0, 0] = -9999
    values[1, 1, :4] = [np.nan, np.inf, 9.96921e36, -3.4e38]
    file = tiff(values, extratags=[(42113, "s", 0, "-9999", True)])
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "0.tif").write_bytes(file)
    (tmp_path / "train/b/1.tif").write_bytes(tiff(values[..., :4]))
    added = settings_for(set(), {"data.root": str(tmp_path)})
    err = capfd.readouterr().err
    assert "18 numbers (2.8%) are missing" in err
    assert "b/1.tif: it has 4 channels, not 5" in err
    known = np.where((values >= 0) & (values < 1e30), values, np.nan).astype(float)
    mean, std = added["data.mean"], added["data.std"]
    assert np.allclose(mean, np.nanmean(known, axis=(0, 1)))
    assert np.allclose(std, np.nanstd(known, axis=(0, 1)))
    planes = Planes(reader=READER, in_chans=5, mean=mean, std=std)
    pixels = planes.normalize(read(BytesIO(file), planes))
    assert (pixels[:, 0, 0] == 0).all()


STATISTICS = dict(mean=[0.1, 0.2, 0.3, 0.4, 0.5], std=[0.5, 0.4, 0.3, 0.2, 0.1])
PLAIN = dict(auto_augment=None, color_jitter=None, scale=(0.5, 1.0))


def prepared(fit):
    """Planes, and the same under the training and the evaluation transform."""
    settings = dict(img_size=16, in_chans=5, reader=READER, fit=fit, erase_prob=1)
    data = cait.ImageNetDataModule(**settings, **PLAIN, **STATISTICS)
    values = data.settings.open(BytesIO(npy(FIVE)), "", False)
    seed_generators(1)
    return values, data.train_transform(values), data.eval_transform(values)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_planes_become_square(fit):
    _, trained, evaluated = prepared(fit)
    assert trained.shape == evaluated.shape == (5, 16, 16)
    assert (evaluated[:, 0] == 0).all() == (fit == "pad")


def test_training_is_timms_crop_mirror_and_erasing():
    values, trained, _ = prepared("crop")
    erasing = dict(re_prob=1.0, re_mode="pixel", interpolation="bicubic")
    timms = create_transform((5, 16, 16), is_training=True, **erasing, **PLAIN, **STATISTICS)
    seed_generators(1)
    assert torch.allclose(trained, timms(values), atol=1e-4)
