"""Every decoder gives Pillow's pixels for any file and box, and refuses what Pillow refuses."""

import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded_image import encoded
from harness import parsed
from PIL import ExifTags, Image

from cait.data.reading import AS_SEEN, PUBLISHED, Reading, load_image
from cait.errors import UserError
from cait.extras.fast_input import decode
from cait.extras.fast_input.decode import JpegStream, open_image

FASTEST = decode.choose()
DECODERS = pytest.mark.parametrize("decoder", sorted({FASTEST, "torchvision"}))


def boxes(height, width):
    """The whole, some at random, and columns of a pixel, which nvImageCodec may decode otherwise."""
    yield 0, 0, height, width
    draw = np.random.default_rng(0)
    for _ in range(8):
        top, left = draw.integers((height, width)).tolist()
        box_height, box_width = draw.integers(1, (height - top + 1, width - left + 1)).tolist()
        yield top, left, box_height, box_width
    for left in (*range(min(width, 20)), width - 1):
        yield height // 3, left, 1 + height // 3, 1


def assert_as_pillow(data, decoder, reading=AS_SEEN, whole=False):
    """The boxes have Pillow's pixels, or even the first pixel is refused. Returns whether Pillow reads the file."""
    try:
        expected = np.asarray(load_image(BytesIO(data), "it", reading))
    except UserError:
        with pytest.raises(UserError, match=r"^cannot read the image it: [^\n]*$"):
            open_image(BytesIO(data), "it", whole, decoder, reading).crop((0, 0, 1, 1))
        return False
    image = open_image(BytesIO(data), "it", whole, decoder, reading)
    height, width, _ = expected.shape
    assert image.size == (width, height)
    for top, left, box_height, box_width in boxes(height, width):
        pixels = image.crop((top, left, box_height, box_width))
        box = expected[top : top + box_height, left : left + box_width]
        np.testing.assert_array_equal(pixels, box)
        torch.from_numpy(pixels)[:] = 0  # it is the caller's, and torch takes no negative strides
    return True


# Files of every kind


def sampled(jpeg, luma):
    """A file of 128 × 128 with so many luma blocks a unit. Its content is scrambled, which does no harm here."""
    place = jpeg.index(b"\xff\xc0") + 11
    return jpeg[:place] + bytes([luma]) + jpeg[place + 1 :]


@pytest.fixture(scope="module")
def files(photographs):
    """A file of every kind by its name."""
    photo = photographs[0].resize((123, 89))
    square = photographs[1].resize((128, 128))
    files = {}
    table = parsed(Path(__file__).with_name("files.yaml"))
    for name, settings in table.items():
        size = settings.pop("size", photo.size)
        mode = settings.pop("mode", "RGB")
        files[name] = encoded(photo.resize(size).convert(mode), **settings)

    inks = [square.convert("L").rotate(20 * ink) for ink in range(4)]
    cmyk = encoded(Image.merge("CMYK", inks))
    adobe = cmyk.index(b"Adobe")  # inverted, says this segment of 14 bytes
    exif = Image.Exif()
    for orientation in range(10):  # the first and the last are none
        exif[ExifTags.Base.Orientation] = orientation
        files[f"orientation {orientation}"] = encoded(photo, exif=exif)
    return files | {
        "440": sampled(encoded(square, subsampling=1), 0x12),
        "411": sampled(encoded(square, subsampling=2), 0x41),
        "adobe cmyk": cmyk,
        "cmyk": cmyk[: adobe - 4] + cmyk[adobe + 12 :],
        "ycck": cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :],
        "first scans alone": encoded(square, progressive=True)[:1500] + decode.JPEG_END,
        "more behind": files["subsampling 2"] + b"more",
        "another behind": files["subsampling 2"] + files["quality 1"],
        "a thumbnail": encoded(photo, exif=b"Exif\0\0" + encoded(square.resize((40, 30)))),
        "several": encoded(photo, "MPO", save_all=True, append_images=[square]),
        "PPM with a comment": files["PPM"].replace(b"\n", b"\n# no more\n", 1),
    }


READINGS = [AS_SEEN, PUBLISHED, Reading(in_chans=1), Reading(shrink=30)]


@DECODERS
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_every_kind_of_file_has_pillows_pixels(files, decoder, reading, whole):
    for name, data in files.items():
        assert assert_as_pillow(data, decoder, reading, whole), name


def test_nvimagecodec_reads_the_common_jpegs(files):
    if FASTEST != "nvimgcodec":
        pytest.skip("nvImageCodec is not installed")
    for name in ("subsampling 0", "subsampling 1", "subsampling 2", "gray", "restarts"):
        assert isinstance(open_image(BytesIO(files[name]), "", False, FASTEST), JpegStream)


def test_a_small_file_takes_little_memory(files):
    tracemalloc.start()
    open_image(BytesIO(files["subsampling 2"]), "", False, FASTEST).crop((0, 0, 30, 40))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


# Damaged files


@DECODERS
@pytest.mark.parametrize(
    "name", ["subsampling 2", "progressive", "restarts", "a thumbnail", "PNG of RGBA", "PPM"]
)
def test_a_cut_file_is_refused_even_for_a_box_above_the_cut(files, decoder, name):
    data = files[name]
    size = len(data)
    behind_a_thumbnail = data.index(decode.JPEG_END) + 2 if "thumbnail" in name else 0
    lengths = range(0, size - 3, size // 15 + 1)
    for length in (*lengths, size * 9 // 10, size - 2, behind_a_thumbnail):
        cut = data[:length]
        is_read = assert_as_pillow(cut, decoder)
        assert not is_read or name.startswith("PNG")  # of a PNG the last chunk holds nothing
        # An end behind the cut has Pillow take it for whole.
        assert_as_pillow(cut + decode.JPEG_END, decoder)


@DECODERS
def test_damaged_bytes_are_read_or_refused_as_by_pillow(photographs, decoder):
    photo = photographs[1].resize((64, 48))
    whole = [encoded(photo), encoded(photo, progressive=True), encoded(photo.convert("CMYK"))]
    read = 0
    for seed in range(240):
        draw = np.random.default_rng(seed)
        data = bytearray(whole[seed % 3])
        headers_end = data.index(b"\xff\xda") + 14
        first, last = (0, headers_end) if seed % 2 else (headers_end, len(data))
        data[draw.integers(first, last)] = 255  # makes markers, in the scan
        data[draw.integers(first, last)] = draw.integers(256)
        read += assert_as_pillow(bytes(data), decoder)
    assert 60 < read < 220


@DECODERS
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_past_pillows_limit_all_refuse(photographs, decoder, monkeypatch):
    data = encoded(photographs[0].resize((100, 80)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    assert assert_as_pillow(data, decoder)  # twice the limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3999)
    assert not assert_as_pillow(data, decoder)


@DECODERS
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", b"text" * 50, b"P6\n9 9\n255\n"]
)
def test_what_is_no_image_is_refused(decoder, data, whole):
    assert not assert_as_pillow(data, decoder, whole=whole)
