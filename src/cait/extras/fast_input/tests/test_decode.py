"""Every decoder gives Pillow's pixels for any file and box, and refuses what Pillow refuses."""

import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from encoded_image import encoded
from PIL import ExifTags, Image

from cait.data.reading import AS_SEEN, PUBLISHED, Reading, load_image
from cait.errors import UserError
from cait.extras.fast_input import decode
from cait.extras.fast_input.decode import JpegStream, open_image

FASTEST = decode.choose()
DECODERS = pytest.mark.parametrize("decoder", sorted({FASTEST, "torchvision"}))


def many_boxes(height, width):
    """The whole, a narrow one above, each corner's pixel, and some at random."""
    yield 0, 0, height, width
    yield 0, 0, max(1, height // 8), width
    for top in (0, height - 1):
        for left in (0, width - 1):
            yield top, left, 1, 1
    draw = np.random.default_rng(0)
    for _ in range(8):
        top, left = draw.integers((height, width)).tolist()
        box_height, box_width = draw.integers(1, (height - top + 1, width - left + 1)).tolist()
        yield top, left, box_height, box_width


def two_boxes(height, width):
    yield 0, 0, max(1, height // 8), width
    yield height // 3, width // 3, 1 + height // 3, 1 + width // 3


def assert_as_pillow(data, decoder, reading=AS_SEEN, whole=False, boxes=many_boxes):
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
        pixels[:] = 0  # it is the caller's
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
    table = yaml.safe_load(Path(__file__).with_name("files.yaml").read_text())
    for name, settings in table.items():
        size = settings.pop("size", photo.size)
        mode = settings.pop("mode", "RGB")
        files[name] = encoded(photo.resize(size).convert(mode), **settings)

    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    deep = np.arange(0, 65536, 11, dtype=np.uint16)[:5900].reshape(59, 100)
    inks = [square.convert("L").rotate(20 * ink) for ink in range(4)]
    cmyk = encoded(Image.merge("CMYK", inks))
    adobe = cmyk.index(b"Adobe")  # inverted, says this segment of 14 bytes
    return files | {
        "440": sampled(encoded(square, subsampling=1), 0x12),
        "411": sampled(encoded(square, subsampling=2), 0x41),
        "adobe cmyk": cmyk,
        "cmyk": cmyk[: adobe - 4] + cmyk[adobe + 12 :],
        "ycck": cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :],
        "first scans alone": encoded(square, progressive=True)[:1500] + decode.JPEG_END,
        "turned": encoded(photo, exif=turned),
        "more behind": files["subsampling 2"] + b"more",
        "another behind": files["subsampling 2"] + files["quality 1"],
        "several": encoded(photo, "MPO", save_all=True, append_images=[square]),
        "deep PNG": encoded(Image.fromarray(deep), "PNG"),
        "PPM with a comment": files["PPM"].replace(b"\n", b"\n# no more\n", 1),
    }


READINGS = [AS_SEEN, PUBLISHED, Reading(in_chans=1), Reading(shrink=30)]


@DECODERS
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reading", READINGS, ids=["as seen", "as published", "gray", "shrunk"])
def test_every_kind_of_file_has_pillows_pixels(files, decoder, reading, whole):
    for name, data in files.items():
        assert assert_as_pillow(data, decoder, reading, whole), name


def test_a_file_may_be_called_otherwise(files, tmp_path):
    path = tmp_path / "it.png"
    path.write_bytes(files["subsampling 2"])
    assert open_image(str(path), "", False, FASTEST).size == (123, 89)


@DECODERS
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("reading", [AS_SEEN, PUBLISHED])
def test_each_orientation_is_turned_as_pillow_turns_it(photographs, decoder, progressive, reading):
    photo = photographs[0].resize((61, 40))
    exif = Image.Exif()
    for orientation in range(10):  # the first and the last are none
        exif[ExifTags.Base.Orientation] = orientation
        data = encoded(photo, exif=exif, progressive=progressive)
        assert assert_as_pillow(data, decoder, reading)
        image = open_image(BytesIO(data), "it", False, decoder, reading)
        assert image.crop((2, 3, 20, 10)).flags.c_contiguous


@DECODERS
def test_an_orientation_in_xmp_data_counts_and_broken_exif_data_do_not(photographs, decoder):
    photo = photographs[0].resize((61, 40))
    xmp = encoded(photo, xmp=b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>')
    broken = encoded(photo, exif=b"Exif\0\0II*\0\xff\xff\xff\xff and so on")
    for data, size in ((xmp, (40, 61)), (broken, (61, 40))):
        assert open_image(BytesIO(data), "it", False, decoder).size == size
        assert assert_as_pillow(data, decoder)


@DECODERS
@pytest.mark.parametrize("subsampling", range(3))
def test_narrow_boxes_of_subsampled_noise(decoder, subsampling):
    def narrow_boxes(height, width):
        for left in range(width):
            yield 0, left, 1, 1
            yield 1, left, 4, 1
            yield 7, left, 3, min(2, width - left)
            yield height - 4, left, 4, width - left

    noise = np.random.default_rng(0).integers(0, 256, (20, 19, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), subsampling=subsampling, quality=95)
    assert assert_as_pillow(data, decoder, boxes=narrow_boxes)


def test_nvimagecodec_reads_the_common_jpegs(files):
    if FASTEST != "nvimgcodec":
        pytest.skip("nvImageCodec is not installed")
    for name in ("subsampling 0", "subsampling 1", "subsampling 2", "gray", "restarts"):
        image = open_image(BytesIO(files[name]), "", False, "nvimgcodec")
        assert type(image) is JpegStream


def test_a_small_file_takes_little_memory(files):
    tracemalloc.start()
    open_image(BytesIO(files["subsampling 2"]), "", False, FASTEST).crop((0, 0, 30, 40))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


# Damaged files


@DECODERS
@pytest.mark.parametrize("name", ["subsampling 2", "progressive", "restarts", "PNG of RGBA", "PPM"])
def test_a_cut_file_is_refused_even_for_a_box_above_the_cut(files, decoder, name):
    data = files[name]
    size = len(data)
    for length in (*range(0, size - 3, size // 15 + 1), size * 9 // 10, size - 2):
        cut = data[:length]
        is_read = assert_as_pillow(cut, decoder, boxes=two_boxes)
        assert not is_read or name.startswith("PNG")  # of a PNG the last chunk holds nothing
        # An end behind the cut has Pillow take it for whole.
        assert_as_pillow(cut + decode.JPEG_END, decoder, boxes=two_boxes)


@DECODERS
def test_a_file_cut_behind_its_thumbnail_is_refused(photographs, decoder):
    content = b"Exif\0\0" + encoded(photographs[0].resize((40, 30)))
    segment = b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content
    assert segment.endswith(decode.JPEG_END)
    jpeg = encoded(photographs[0].resize((123, 89)))
    assert assert_as_pillow(jpeg[:2] + segment + jpeg[2:], decoder)
    assert not assert_as_pillow(jpeg[:2] + segment, decoder)


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
        read += assert_as_pillow(bytes(data), decoder, boxes=two_boxes)
    assert 60 < read < 220


@DECODERS
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_past_pillows_limit_all_refuse(photographs, decoder, kind, monkeypatch):
    data = encoded(photographs[0].resize((100, 80)), kind)
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


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/gone.jpg: No such file"):
        open_image(tmp_path / "gone.jpg", "", False, FASTEST)
