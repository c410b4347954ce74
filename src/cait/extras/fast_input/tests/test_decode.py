"""Every decoder gives Pillow's pixels for any file and box, and refuses what Pillow refuses."""

import os
import tracemalloc
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoded_image import encoded
from PIL import ExifTags, Image, ImageOps

from cait.data.reading import AS_SEEN, PUBLISHED, Reading, load_image
from cait.errors import UserError
from cait.extras.fast_input import decode
from cait.extras.fast_input.decode import Decoder, JpegStream, open_image

FASTEST = decode.choose()
DECODERS = pytest.mark.parametrize("decoder", sorted({FASTEST, "torchvision"}))


def sampled(jpeg: bytes, luma: int) -> bytes:
    """A file of 128 × 128 with so many luma blocks a unit. Its content is scrambled, which does no harm here."""
    place = jpeg.index(b"\xff\xc0") + 11
    return jpeg[:place] + bytes([luma]) + jpeg[place + 1 :]


@pytest.fixture(scope="module")
def files(photographs: list[Image.Image]) -> dict[str, bytes]:
    """A file of every kind by its name."""
    photo = photographs[0].resize((123, 89))
    square = photographs[1].resize((128, 128))
    turned = Image.Exif()
    turned[0x0112] = 6  # Orientation: to be turned by 90°
    four = [np.asarray(square.convert("L").rotate(20 * channel)) for channel in range(4)]
    cmyk = encoded(Image.frombytes("CMYK", (128, 128), np.stack(four, axis=2).tobytes()))
    adobe = cmyk.index(b"Adobe")  # inverted, says this segment of 14 bytes
    found = {f"subsampling {step}.jpg": encoded(photo, subsampling=step) for step in range(3)}
    plain = found["subsampling 2.jpg"]
    found |= {
        "440.jpg": sampled(encoded(square, subsampling=1), 0x12),
        "411.jpg": sampled(encoded(square, subsampling=2), 0x41),
        "gray.jpg": encoded(photo.convert("L")),
        "adobe cmyk.jpg": cmyk,
        "cmyk.jpg": cmyk[: adobe - 4] + cmyk[adobe + 12 :],
        "ycck.jpg": cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :],
        "rgb.jpg": encoded(photo, keep_rgb=True),
        "quality 1.jpg": encoded(photo, quality=1),
        "quality 100.jpg": encoded(photo, quality=100),
        "progressive.jpg": encoded(photo, progressive=True),
        "first scans alone.jpg": encoded(square, progressive=True)[:1500] + b"\xff\xd9",
        "restarts.jpg": encoded(photo, restart_marker_blocks=3),
        "turned.jpg": encoded(photo, exif=turned),
        "more behind.jpg": plain + b"more",
        "another behind.jpg": plain + encoded(photo, quality=20),
        "several.jpg": encoded(photo, "MPO", save_all=True, append_images=[square]),
        "jpeg.png": plain,
        "png.jpg": encoded(photo, "PNG"),
        "palette.png": encoded(photo.convert("P"), "PNG", transparency=b"\x00\x10\x20"),
        "rgba.png": encoded(photo.convert("RGBA"), "PNG"),
        "la.png": encoded(photo.convert("LA"), "PNG"),
        "one bit.png": encoded(photo.convert("1"), "PNG"),
        "deep.png": encoded(
            Image.fromarray(np.arange(0, 65536, 11, dtype=np.uint16)[:5900].reshape(59, 100)), "PNG"
        ),
        "gif.jpg": encoded(photo, "GIF"),
        **{f"{kind}.{kind}": encoded(photo, kind) for kind in ("webp", "bmp", "tiff", "ppm")},
        "comment.ppm": encoded(photo, "PPM").replace(b"\n", b"\n# no more\n", 1),
    }
    for size in ((1, 1), (3, 2), (1, 40)):
        tiny = photo.resize(size)
        found |= {f"{size}.png": encoded(tiny, "PNG"), f"{size}.jpg": encoded(tiny)}
    return found


def oracle(data: bytes) -> np.ndarray | None:
    """Pillow's pixels, None where it refuses."""
    try:
        return np.asarray(load_image(BytesIO(data), "it"))
    except UserError:
        return None


def cropped(
    data: bytes, box: decode.Box, decoder: Decoder, whole: bool = False
) -> np.ndarray | None:
    try:
        return open_image(BytesIO(data), "it", whole, decoder).crop(box)
    except UserError as error:
        told = str(error)
    assert told.startswith("cannot read the image it: ")
    assert "\n" not in told
    return None


def boxes(height: int, width: int, seed: int = 0) -> Iterator[decode.Box]:
    """The whole, a narrow one above, each corner's pixel, and some at random."""
    yield from ((0, 0, height, width), (0, 0, max(1, height // 8), width))
    yield from ((top, left, 1, 1) for top in (0, height - 1) for left in (0, width - 1))
    rng = np.random.default_rng(seed)
    for _ in range(8):
        top, left = int(rng.integers(height)), int(rng.integers(width))
        yield (
            top,
            left,
            int(rng.integers(1, height - top + 1)),
            int(rng.integers(1, width - left + 1)),
        )


def assert_as_pillow(data: bytes, decoder: Decoder, name: str = "", few: bool = False) -> bool:
    """Of some boxes, or of two. Returns whether Pillow reads it."""
    expected = oracle(data)
    height, width = (64, 64) if expected is None else expected.shape[:2]
    tried = [
        (0, 0, max(1, height // 8), width),
        (height // 3, width // 3, 1 + height // 3, 1 + width // 3),
    ]
    for top, left, h, w in tried if few else boxes(height, width):
        pixels = cropped(data, (top, left, h, w), decoder)
        assert (pixels is None) == (expected is None), name
        if expected is not None:
            np.testing.assert_array_equal(pixels, expected[top : top + h, left : left + w], name)
    return expected is not None


@DECODERS
def test_every_kind_of_file_has_pillows_pixels(
    files: dict[str, bytes], decoder: Decoder, tmp_path: Path
) -> None:
    for name, data in files.items():
        assert assert_as_pillow(data, decoder, name), name
        (tmp_path / name).write_bytes(data)
        for reading in (AS_SEEN, Reading(in_chans=1), Reading(shrink=30)):
            pixels = np.asarray(load_image(BytesIO(data), "it", reading))
            for whole in (False, True):
                image = open_image(str(tmp_path / name), "", whole, decoder, reading)
                assert image.size == (pixels.shape[1], pixels.shape[0])
                got = image.crop((0, 0, *pixels.shape[:2]))
                np.testing.assert_array_equal(got, pixels, name)
                got[:] = 0  # it is the caller's
                np.testing.assert_array_equal(image.crop((0, 0, *pixels.shape[:2])), pixels, name)
    assert oracle(files["turned.jpg"]).shape == (123, 89, 3)  # upright


@DECODERS
@pytest.mark.parametrize("settings", [{}, {"progressive": True}])
def test_each_orientation_is_turned_as_pillow_turns_it(
    photographs: list[Image.Image], decoder: Decoder, settings: dict[str, Any]
) -> None:
    photo, exif = photographs[0].resize((61, 40)), Image.Exif()
    for orientation in range(10):  # the first and the last are none
        exif[ExifTags.Base.Orientation] = orientation
        data = encoded(photo, exif=exif, **settings)
        stored = Image.open(BytesIO(data))
        for reading, seen in ((AS_SEEN, ImageOps.exif_transpose(stored)), (PUBLISHED, stored)):
            expected = np.asarray(seen.convert("RGB"))
            image = open_image(BytesIO(data), "it", False, decoder, reading)
            assert image.size == expected.shape[1::-1]
            for top, left, height, width in boxes(*expected.shape[:2], seed=orientation):
                box = image.crop((top, left, height, width))
                np.testing.assert_array_equal(
                    box, expected[top : top + height, left : left + width]
                )
                assert box.flags.c_contiguous


@DECODERS
def test_an_orientation_in_xmp_data_counts_and_broken_exif_data_do_not(
    photographs: list[Image.Image], decoder: Decoder
) -> None:
    photo = photographs[0].resize((61, 40))
    xmp = encoded(photo, xmp=b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>')
    broken = encoded(photo, exif=b"Exif\0\0II*\0\xff\xff\xff\xff and so on")
    for data, size in ((xmp, (40, 61)), (broken, (61, 40))):
        assert open_image(BytesIO(data), "it", False, decoder).size == size
        assert assert_as_pillow(data, decoder)


def test_what_is_transparent_shows_the_background(photographs: list[Image.Image]) -> None:
    rgba = photographs[0].resize((40, 30)).convert("RGBA")
    alpha = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
    alpha[:10] = 0
    rgba.putalpha(Image.fromarray(alpha))
    for image in (rgba, rgba.convert("LA"), rgba.quantize(32)):
        data = encoded(image, "PNG")
        pixels = np.asarray(Image.open(BytesIO(data)).convert("RGBA")).astype(float)
        share = pixels[..., 3:] / 255
        for background, color in (("white", (255, 255, 255)), ("#204060", (0x20, 0x40, 0x60))):
            read = open_image(
                BytesIO(data), "it", False, FASTEST, Reading(background=background)
            ).crop((0, 0, 30, 40))
            expected = pixels[..., :3] * share + np.array(color) * (1 - share)  # by hand
            np.testing.assert_allclose(read, expected, atol=1)
        hidden = open_image(BytesIO(data), "it", False, FASTEST, PUBLISHED).crop((0, 0, 30, 40))
        np.testing.assert_array_equal(hidden, pixels[..., :3])


def test_nvimagecodec_reads_the_common_jpegs(files: dict[str, bytes]) -> None:
    if FASTEST != "nvimgcodec":
        pytest.skip("nvImageCodec is not installed")
    for name in (
        "subsampling 0.jpg",
        "subsampling 1.jpg",
        "subsampling 2.jpg",
        "gray.jpg",
        "restarts.jpg",
    ):
        assert type(open_image(BytesIO(files[name]), "", False, "nvimgcodec")) is JpegStream


@DECODERS
@pytest.mark.parametrize(
    "name", ["subsampling 2.jpg", "progressive.jpg", "restarts.jpg", "rgba.png", "ppm.ppm"]
)
def test_a_cut_file_is_refused_even_for_a_box_above_the_cut(
    files: dict[str, bytes], decoder: Decoder, name: str
) -> None:
    data = files[name]
    for length in {
        len(data) - 2,
        len(data) * 9 // 10,
        *range(0, len(data) - 3, len(data) // 15 + 1),
    }:
        read = assert_as_pillow(data[:length], decoder, f"{length} of {len(data)}", few=True)
        assert not read or name.endswith("png")  # of a PNG the last chunk holds nothing
        # An end behind the cut has Pillow take it for whole.
        assert_as_pillow(
            data[:length] + decode.JPEG_END,
            decoder,
            f"{length} of {len(data)} and an end",
            few=True,
        )


@DECODERS
def test_a_file_cut_behind_its_thumbnail_is_refused(
    photographs: list[Image.Image], decoder: Decoder
) -> None:
    thumbnail = encoded(photographs[0].resize((40, 30)))
    content = b"Exif\0\0" + thumbnail
    segment = b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content
    jpeg = encoded(photographs[0].resize((123, 89)))
    whole = jpeg[:2] + segment + jpeg[2:]
    assert assert_as_pillow(whole, decoder)
    cut = whole[: 2 + len(segment)]
    assert cut.endswith(decode.JPEG_END)
    assert not assert_as_pillow(cut, decoder)


@DECODERS
def test_damaged_bytes_are_read_or_refused_as_by_pillow(
    photographs: list[Image.Image], decoder: Decoder
) -> None:
    photo = photographs[1].resize((64, 48))
    whole = [encoded(photo), encoded(photo, progressive=True), encoded(photo.convert("CMYK"))]
    read = 0
    for seed in range(240):
        rng = np.random.default_rng(seed)
        data = bytearray(whole[seed % 3])
        scan = data.index(b"\xff\xda")
        span = (0, scan + 14) if seed % 2 else (scan + 14, len(data))  # the headers or the rest
        data[rng.integers(*span)] = 255  # makes markers, in the scan
        data[rng.integers(*span)] = rng.integers(256)
        read += assert_as_pillow(bytes(data), decoder, f"seed {seed}", few=True)
    assert 60 < read < 220


@DECODERS
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_past_pillows_limit_all_refuse(
    photographs: list[Image.Image], decoder: Decoder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photographs[0].resize((100, 80)), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    assert assert_as_pillow(data, decoder)  # twice the limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3999)
    with pytest.raises(
        UserError, match=r"^cannot read the image it: .*exceeds limit of 7998 pixels"
    ) as caught:
        open_image(BytesIO(data), "it", False, decoder)
    assert "\n" not in str(caught.value)


@DECODERS
def test_what_is_no_image_or_missing_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    for data in (b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", b"text" * 50, b"P6\n9 9\n255\n"):
        for whole in (False, True):
            assert cropped(data, (0, 0, 1, 1), decoder, whole) is None
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, words in (("pipe.jpg", "it is not a regular file"), ("gone.jpg", "No such file")):
        with pytest.raises(
            UserError, match=rf"^cannot read the image {tmp_path / name}: .*{words}"
        ):
            open_image(tmp_path / name, "", False, decoder)


@DECODERS
def test_narrow_boxes_of_subsampled_noise(decoder: Decoder) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 19, 3), dtype=np.uint8))
    for subsampling in range(3):
        data = encoded(noise, subsampling=subsampling, quality=95)
        expected, image = oracle(data), open_image(BytesIO(data), "it", False, decoder)
        for left in range(19):
            for top, height, width in ((0, 1, 1), (1, 4, 1), (7, 3, 2), (16, 4, 19 - left)):
                right, bottom = min(19, left + width), top + height
                pixels = image.crop((top, left, height, right - left))
                np.testing.assert_array_equal(pixels, expected[top:bottom, left:right])


def test_a_small_file_takes_little_memory(files: dict[str, bytes], tmp_path: Path) -> None:
    (path := tmp_path / "small.jpg").write_bytes(files["subsampling 2.jpg"])
    tracemalloc.start()
    open_image(str(path), "", False, FASTEST).crop((0, 0, 30, 40))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22
