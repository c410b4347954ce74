"""How a file becomes an image: deep pixels, streams, sizes, and files that claim far more work than their pixels.

What is refused is in tests/cli/golden/data.yaml and pictures.yaml.
"""

from io import BytesIO, UnsupportedOperation
from pathlib import Path

import numpy as np
import pytest
import tifffile
from encoded_image import encoded
from harness import parsed
from PIL import Image
from torch.nn.functional import avg_pool2d
from torch.testing import assert_close
from torchvision.transforms.functional import pil_to_tensor

from cait.data import reading
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import Reading, load_image, open_bytes
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
    found = []
    for kind in ("minisblack", "miniswhite"):
        tifffile.imwrite(tmp_path / kind, pixels, photometric=kind)
        found.append(pixels_of(tmp_path / kind))
    assert np.array_equal(found[1], 255 - found[0])


def test_channels_of_sixteen_bits_may_lie_one_after_the_other(tmp_path):
    planes = (257 * np.arange(192, dtype=np.uint16)).reshape(3, 8, 8)
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, planes, compression="zlib", photometric="rgb", planarconfig="separate")
    assert np.array_equal(pixels_of(path), np.moveaxis(planes >> 8, 0, -1))


# What is transparent


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("background", ["white", "#204060", None])
def test_what_is_transparent_shows_the_background(mode, background, photographs):
    art = photographs[0].resize((40, 30)).convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(art.size))
    image = art.quantize(32) if mode == "P" else art.convert(mode)
    expected = image.convert("RGBA")
    if background is None:  # the colors that the file holds
        expected.putalpha(255)
    else:
        color = Image.new("RGBA", art.size, background)
        expected = Image.alpha_composite(color, expected)
    found = load_image(BytesIO(encoded(image, "PNG")), reading=Reading(background=background))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected)[..., :3], atol=1)


# Streams and sizes


class OneWay(BytesIO):
    """A stream that cannot go back, as an answer over HTTP."""

    def seekable(self):
        return False

    def seek(self, *_):
        raise UnsupportedOperation("seek")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_stream_that_cannot_go_back_is_read_once(kind, photographs):
    data = encoded(photographs[0].resize((60, 40)), kind)
    assert np.array_equal(pixels_of(OneWay(data)), pixels_of(BytesIO(data)))


def test_a_stream_that_can_go_back_is_not_copied():
    stream = BytesIO(b"pixels")
    with open_bytes(stream) as opened:
        assert opened is stream


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
    means = pil_to_tensor(photo).double()
    while min(means.shape[1:]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        means = avg_pool2d(means, 2, ceil_mode=True)
    assert_close(pil_to_tensor(shrunk).double(), means, rtol=0, atol=3)
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

BOMBS = parsed(Path(__file__).with_name("bombs.yaml"))


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb["case"])
def test_a_small_picture_may_not_take_much(bomb, tmp_path, monkeypatch):
    """By whatever reads it: the facts of the file are counted before, and while, it is decoded."""
    monkeypatch.setattr(reading, "OPENING", (10_000, 2**20))
    monkeypatch.setattr(reading, "DECODING", (10_000, 2**16))
    path = tmp_path / "x.jpg"
    path.write_bytes(b"".join(bytes.fromhex(piece) * times for piece, times in bomb["pieces"]))
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
