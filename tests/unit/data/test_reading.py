"""How a file becomes an image: deep pixels, streams, sizes, and files that claim far more work than their pixels."""

import os
import struct
import zlib
from io import BytesIO, UnsupportedOperation

import numpy as np
import pytest
import tifffile
from encoded_image import encoded
from PIL import Image

from cait.data import reading
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import Reading, load_image
from cait.errors import UserError


def pixels_of(image):
    return np.asarray(load_image(image))


# Pixels of more than eight bits

FLOATS = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
SIXTEEN = (65535 * FLOATS).astype(np.uint16)


@pytest.mark.parametrize(
    ("pixels", "suffix", "expected"),
    [
        (FLOATS, "tif", np.rint(255 * FLOATS)),
        (SIXTEEN, "tif", SIXTEEN >> 8),
        (SIXTEEN, "png", SIXTEEN >> 8),
    ],
)
def test_gray_of_more_than_eight_bits_is_scaled(pixels, suffix, expected, tmp_path):
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(pixels).save(path)
    assert np.array_equal(pixels_of(path)[..., 1], expected)


@pytest.mark.parametrize("pixels", [SIXTEEN, FLOATS])
def test_tiff_files_whose_white_is_zero_are_turned(pixels, tmp_path):
    for kind in ("minisblack", "miniswhite"):
        tifffile.imwrite(tmp_path / kind, pixels, photometric=kind)
    assert np.array_equal(
        pixels_of(tmp_path / "miniswhite"), 255 - pixels_of(tmp_path / "minisblack")
    )


PLANES = (257 * np.arange(192, dtype=np.uint16)).reshape(3, 8, 8)
PLANAR = dict(photometric="rgb", planarconfig="separate")


def test_channels_of_sixteen_bits_may_lie_one_after_the_other(tmp_path):
    tifffile.imwrite(tmp_path / "x.tif", PLANES, compression="zlib", **PLANAR)
    assert np.array_equal(pixels_of(tmp_path / "x.tif"), np.moveaxis(PLANES >> 8, 0, -1))


@pytest.mark.parametrize(
    ("pixels", "settings", "reason"),
    [
        (PLANES, PLANAR, "one after the other"),
        (np.stack([FLOATS] * 3, axis=-1), dict(photometric="rgb"), "8 or 16 bits"),
        (FLOATS.astype(np.float16), {}, "8 or 16 bits"),
        ((127 * FLOATS).astype(np.int8), {}, "which is white"),
        ((255 * FLOATS).astype(np.int32), {}, "which is white"),
        (FLOATS.round(), dict(byteorder=">", compression="zlib"), "big-endian"),
    ],
)
def test_pixels_that_pillow_reads_wrong_are_refused(pixels, settings, reason, tmp_path):
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, pixels, **settings)
    with pytest.raises(UserError, match=f"{path}: .*{reason}"):
        load_image(path)


# What is transparent


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("background", ["white", "#204060", None])
def test_what_is_transparent_shows_the_background(mode, background, photographs):
    art = photographs[0].resize((40, 30)).convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(art.size))
    image = art.quantize(32) if mode == "P" else art.convert(mode)
    data = encoded(image, "PNG")
    expected = Image.open(BytesIO(data)).convert("RGBA")
    if background is None:  # the colors that the file holds
        expected.putalpha(255)
    else:
        color = Image.new("RGBA", art.size, background)
        expected = Image.alpha_composite(color, expected)
    found = load_image(BytesIO(data), reading=Reading(background=background))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected)[..., :3], atol=1)


# Streams and sizes


class OneWay(BytesIO):
    """A stream that cannot go back, as an answer over HTTP."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise UnsupportedOperation("seek")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_stream_that_cannot_go_back_is_read_once(kind, photographs):
    data = encoded(photographs[0].resize((60, 40)), kind)
    assert np.array_equal(pixels_of(OneWay(data)), pixels_of(BytesIO(data)))


@pytest.mark.parametrize(
    ("size", "halved"),
    [
        ((99, 300), (99, 300)),
        ((100, 300), (50, 150)),
        ((401, 800), (51, 100)),
        ((1700, 1601), (54, 51)),
    ],
)
def test_images_are_halved_while_their_shorter_side_keeps_so_many_pixels(
    size, halved, photographs, tmp_path
):
    photo = photographs[0].resize(size)
    shrunk = load_image(photo, reading=Reading(shrink=50))
    assert shrunk.size == halved
    means = np.asarray(photo, float)
    while min(means.shape[:2]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        height, width, _ = means.shape
        padded = np.pad(means, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge")
        means = (padded[::2, ::2] + padded[1::2, ::2] + padded[::2, 1::2] + padded[1::2, 1::2]) / 4
    np.testing.assert_allclose(np.asarray(shrunk), means, atol=3)
    photo.save(tmp_path / "photo.jpg")
    with Image.open(tmp_path / "photo.jpg") as opened:
        assert load_image(opened, reading=Reading(shrink=50)).size == halved
        assert opened.size == size  # the caller's image is as it was


def test_photographs_of_telephones_are_read(photographs):
    pytest.importorskip("pillow_heif")
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = photographs[0].resize((320, 214))
    upright = photo.transpose(Image.Transpose.ROTATE_270)
    heic = encoded(photo, "HEIF", quality=95, exif=turned.tobytes())
    avif = encoded(photo, "AVIF", quality=95)
    for data, expected in ((heic, upright), (avif, photo)):
        difference = pixels_of(BytesIO(data)).astype(int) - np.asarray(expected)
        assert np.abs(difference).mean() < 4


# Files that claim far more than their pixels


def chunk(kind, content):
    """A piece of a PNG file."""
    tagged = kind + content
    return struct.pack(">I", len(content)) + tagged + struct.pack(">I", zlib.crc32(tagged))


PICTURE = Image.linear_gradient("L").resize((64, 64))


def with_more(kind, start, more):
    """The picture with `more` at this place of its file."""
    data = encoded(PICTURE, kind)
    return data[:start] + more + data[start:] if start else data + more


def jpeg_of_many_scans():
    data = encoded(PICTURE, progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + 3_000 * last + data[-2:]


PALETTE_END = encoded(PICTURE, "GIF").index(b",\0\0\0\0")
HEADER_END = 8 + 25
"""Where the pixels of a PNG file begin."""
BOMBS = {
    "JPEG of many scans": jpeg_of_many_scans(),
    "JPEG with padding": with_more("JPEG", 2, b"\xff" * 100_000),
    "JPEG with padding at the end": with_more("JPEG", -2, b"\xff" * 100_000),
    "JPEG of many comments": with_more("JPEG", 2, b"\xff\xfe\0\2" * 100_000),
    "JPEG with junk": with_more("JPEG", 2, b"\xff\0" * 100_000),
    "PNG of many chunks": with_more("PNG", HEADER_END, chunk(b"teSt", b"") * 10_000),
    "PNG of many empty chunks of data": with_more("PNG", HEADER_END, chunk(b"IDAT", b"") * 10_000),
    "PNG of a large chunk": with_more("PNG", HEADER_END, chunk(b"teSt", bytes(2**21))),
    "GIF of a long comment": with_more(
        "GIF", PALETTE_END, b"!\xfe" + (b"\xff" + bytes(255)) * 20_000 + b"\0"
    ),
    "WebP with bytes behind it": with_more("WEBP", None, bytes(2**21)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_picture_may_not_take_much(kind, tmp_path, monkeypatch):
    """By whatever reads it: the facts of the file are counted before, and while, it is decoded."""
    monkeypatch.setattr(reading, "OPENING", (10_000, 2**20))
    monkeypatch.setattr(reading, "DECODING", (10_000, 2**16))
    path = tmp_path / "x.jpg"
    path.write_bytes(BOMBS[kind])
    too_much = "cannot read the image .*(scans are more than|far more parts or bytes)"
    with pytest.raises(UserError, match=too_much):
        load_image(path)
    pipeline = ImageNetDataModule(root=str(tmp_path)).pipeline
    if pipeline:  # of an extra, which may be gone
        with pytest.raises(UserError, match=too_much):
            pipeline.open(path, "x", True)


def test_a_picture_may_take_the_last_byte_that_it_is_allowed(monkeypatch):
    monkeypatch.setattr(reading, "OPENING", (10, 20))
    assert reading.Bounded(BytesIO(bytes(20))).read() == bytes(20)
    with pytest.raises(ValueError, match="far more parts or bytes"):
        reading.Bounded(BytesIO(bytes(21))).read()


def png_of_size(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99)))


def write_sparse(path):
    path.touch()
    os.truncate(path, 300 * 2**30)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: Image.new("RGB", (16, 16)).save(path, "EPS"), "not an image"),
        (lambda path: path.write_bytes(png_of_size(2_000_000, 1)), "2,000,000 × 1 pixels"),
        (lambda path: path.write_bytes(png_of_size(20_000, 20_000)), "exceeds limit"),
        (write_sparse, "1,073,741,824"),
    ],
)
def test_what_is_no_picture_or_too_large_is_refused_by_name(write, reason, tmp_path):
    path = tmp_path / "x.png"
    write(path)
    with pytest.raises(UserError, match=f"^cannot read the image {path}: .*{reason}"):
        load_image(path)
