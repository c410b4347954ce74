"""Every decoder gives Pillow's pixels for any file and box, and refuses what Pillow refuses."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from encoded_image import encoded
from harness import python, script
from PIL import ExifTags, Image, ImageOps

from cait.data.listing import Files
from cait.data.reading import PUBLISHED, Reading, load_rgb
from cait.errors import UserError
from cait.extras.fast_input import decode
from cait.extras.fast_input.decode import Decoder, JpegStream, open_image


def installed() -> list[Any]:
    works = decode.choose("auto") == "nvimgcodec"
    missing = pytest.mark.skipif(not works, reason="nvImageCodec is not installed")
    return [pytest.param(name, marks=missing if name == "nvimgcodec" else ()) for name in get_args(Decoder)]


DECODERS = pytest.mark.parametrize("decoder", installed())


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
        "grey.jpg": encoded(photo.convert("L")),
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
        "deep.png": encoded(Image.fromarray(np.arange(0, 65536, 11, dtype=np.uint16)[:5900].reshape(59, 100)), "PNG"),
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
        return np.asarray(load_rgb(BytesIO(data), "it"))
    except UserError:
        return None


def cropped(data: bytes, box: decode.Box, decoder: Decoder, whole: bool = False) -> np.ndarray | None:
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
        yield top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))


def assert_as_pillow(data: bytes, decoder: Decoder, name: str = "", few: bool = False) -> bool:
    """Of some boxes, or of two. Returns whether Pillow reads it."""
    expected = oracle(data)
    height, width = (64, 64) if expected is None else expected.shape[:2]
    tried = [(0, 0, max(1, height // 8), width), (height // 3, width // 3, 1 + height // 3, 1 + width // 3)]
    for top, left, h, w in tried if few else boxes(height, width):
        pixels = cropped(data, (top, left, h, w), decoder)
        assert (pixels is None) == (expected is None), name
        if expected is not None:
            np.testing.assert_array_equal(pixels, expected[top : top + h, left : left + w], name)
    return expected is not None


@DECODERS
def test_every_kind_of_file_has_pillows_pixels(files: dict[str, bytes], decoder: Decoder, tmp_path: Path) -> None:
    for name, data in files.items():
        assert assert_as_pillow(data, decoder, name), name
        (tmp_path / name).write_bytes(data)
        pixels = oracle(data)
        for whole in (False, True):
            image = open_image(str(tmp_path / name), "", whole, decoder)
            assert image.size == (pixels.shape[1], pixels.shape[0])
            np.testing.assert_array_equal(image.crop((0, 0, *pixels.shape[:2])), pixels, name)
    assert oracle(files["turned.jpg"]).shape == (123, 89, 3)  # upright


def turned(image: Image.Image, orientation: int, kind: str = "JPEG", **settings: Any) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(image, kind, exif=exif, **settings)


ORIENTED = [
    pytest.param(kind, settings, id=name)
    for name, kind, settings in (
        ("jpeg", "JPEG", {}),
        ("progressive", "JPEG", {"progressive": True}),
        ("png", "PNG", {}),
        ("webp", "WEBP", {"lossless": True}),
    )
]


@DECODERS
@pytest.mark.parametrize(("kind", "settings"), ORIENTED)
def test_each_orientation_is_turned_as_pillow_turns_it(
    photographs: list[Image.Image], decoder: Decoder, kind: str, settings: dict[str, Any]
) -> None:
    photo = photographs[0].resize((61, 40))
    shapes = set()
    for orientation in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):  # the first and the last are none
        data = turned(photo, orientation, kind, **settings)
        stored = Image.open(BytesIO(data))
        for reading in (Reading(), PUBLISHED):
            expected = np.asarray(
                (ImageOps.exif_transpose(stored) if reading.exif_orientation else stored).convert("RGB")
            )
            shapes.add(expected.shape)
            for whole in (False, True):
                image = open_image(BytesIO(data), "it", whole, decoder, reading)
                assert image.size == expected.shape[1::-1]
                for top, left, height, width in boxes(*expected.shape[:2], seed=orientation):
                    box = image.crop((top, left, height, width))
                    np.testing.assert_array_equal(box, expected[top : top + height, left : left + width])
                    assert box.flags.c_contiguous
    assert shapes == {(40, 61, 3), (61, 40, 3)}


@DECODERS
def test_an_orientation_in_xmp_data_counts_and_broken_exif_data_do_not(
    photographs: list[Image.Image], decoder: Decoder
) -> None:
    photo = photographs[0].resize((61, 40))
    xmp = encoded(photo, xmp=b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>')
    assert np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(xmp)))).shape == (61, 40, 3)
    broken = encoded(photo, exif=b"Exif\0\0II*\0\xff\xff\xff\xff and so on")
    for data, size in ((xmp, (40, 61)), (broken, (61, 40))):
        assert open_image(BytesIO(data), "it", False, decoder).size == size
        assert assert_as_pillow(data, decoder)


TRANSPARENT = {
    "rgba": lambda image: image,
    "grey": lambda image: image.convert("LA"),
    "palette": lambda image: image.quantize(32),
    "palette and an index": lambda image: with_index(image.convert("P")),
    "key colour": lambda image: with_key(image.convert("RGB")),
}


def with_index(image: Image.Image) -> Image.Image:
    image.info["transparency"] = 3
    image.paste(3, (0, 0, 10, 10))
    return image


def with_key(image: Image.Image) -> Image.Image:
    image.info["transparency"] = image.getpixel((5, 5))
    return image


@DECODERS
@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_shows_the_background(photographs: list[Image.Image], decoder: Decoder, kind: str) -> None:
    rgba = photographs[0].resize((40, 30)).convert("RGBA")
    alpha = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))
    alpha[:10] = 0
    rgba.putalpha(Image.fromarray(alpha))
    data = encoded(TRANSPARENT[kind](rgba), "PNG")
    pixels = np.asarray(Image.open(BytesIO(data)).convert("RGBA")).astype(float)
    share = pixels[..., 3:] / 255
    assert (share == 0).any()
    for background, colour in (("white", (255, 255, 255)), ("#204060", (0x20, 0x40, 0x60))):
        read = open_image(BytesIO(data), "it", False, decoder, Reading(background=background)).crop((0, 0, 30, 40))
        expected = pixels[..., :3] * share + np.array(colour) * (1 - share)  # by hand
        np.testing.assert_allclose(read, expected, atol=1)
        assert (read[share[..., 0] == 0] == colour).all()
        assert (read[share[..., 0] == 1] == pixels[share[..., 0] == 1, :3]).all()
    hidden = open_image(BytesIO(data), "it", False, decoder, PUBLISHED).crop((0, 0, 30, 40))
    np.testing.assert_array_equal(hidden, pixels[..., :3])


@pytest.mark.parametrize("background", ["whit", "#12", "#11223344", ""])
def test_a_background_is_a_colour(background: str) -> None:
    with pytest.raises(UserError, match="background must be a colour, as white or '#8090a0', or null; got"):
        Reading(background=background).check()


def test_nvimagecodec_reads_the_common_jpegs(files: dict[str, bytes]) -> None:
    if decode.choose("auto") != "nvimgcodec":
        pytest.skip("nvImageCodec is not installed")
    common = ["subsampling 0.jpg", "subsampling 1.jpg", "subsampling 2.jpg", "grey.jpg", "turned.jpg", "restarts.jpg"]
    images = {name: open_image(BytesIO(files[name]), "", False, "nvimgcodec") for name in common}
    images["turned.jpg"] = images["turned.jpg"].stored
    assert {type(image) for image in images.values()} == {JpegStream}


def test_of_a_ppm_file_only_the_rows_of_the_crop_are_read(files: dict[str, bytes], tmp_path: Path) -> None:
    read = []

    class Noted(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            read.append(data := super().read(size))
            return data

    data = files["ppm.ppm"]
    image = open_image(Noted(data), "it", False, "torchvision")
    np.testing.assert_array_equal(image.crop((30, 11, 20, 70)), oracle(data)[30:50, 11:81])
    assert sum(map(len, read)) == 32 + 20 * 3 * 123
    (tmp_path / "some.ppm").write_bytes(data)
    with open(tmp_path / "some.ppm", "rb", buffering=0) as file:
        image = open_image(file, "it", False, "torchvision")
        os.truncate(tmp_path / "some.ppm", 1000)
        with pytest.raises(UserError, match=r"^cannot read the image it: "):
            image.crop((30, 11, 20, 70))


@DECODERS
def test_what_is_handed_out_is_the_callers_own(files: dict[str, bytes], decoder: Decoder) -> None:
    image = open_image(BytesIO(files["subsampling 2.jpg"]), "it", True, decoder)
    box = (3, 5, 40, 50)
    before = image.crop(box).copy()
    image.crop(box)[:] = 0
    np.testing.assert_array_equal(image.crop(box), before)


@DECODERS
@pytest.mark.parametrize("name", ["subsampling 2.jpg", "progressive.jpg", "restarts.jpg", "rgba.png", "ppm.ppm"])
def test_a_cut_file_is_refused_even_for_a_box_above_the_cut(
    files: dict[str, bytes], decoder: Decoder, name: str
) -> None:
    data = files[name]
    for length in {len(data) - 2, len(data) * 9 // 10, *range(0, len(data) - 3, len(data) // 15 + 1)}:
        read = assert_as_pillow(data[:length], decoder, f"{length} of {len(data)}", few=True)
        assert not read or name.endswith("png")  # of a PNG the last chunk holds nothing
        # An end behind the cut has Pillow take it for whole.
        assert_as_pillow(data[:length] + decode.JPEG_END, decoder, f"{length} of {len(data)} and an end", few=True)


@DECODERS
def test_a_file_cut_behind_its_thumbnail_is_refused(photographs: list[Image.Image], decoder: Decoder) -> None:
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
def test_damaged_bytes_are_read_or_refused_as_by_pillow(photographs: list[Image.Image], decoder: Decoder) -> None:
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
@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xd9", b"text" * 50, bytes(2000)])
def test_what_is_no_image_is_refused(decoder: Decoder, data: bytes) -> None:
    assert cropped(data, (0, 0, 1, 1), decoder) is None
    assert cropped(data, (0, 0, 1, 1), decoder, whole=True) is None


@DECODERS
def test_a_missing_file_is_told_by_its_path(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot read the image {tmp_path}/gone\.jpg: .*No such file"):
        open_image(tmp_path / "gone.jpg", "", False, decoder)


@DECODERS
def test_a_pipe_and_a_file_without_end_are_refused_by_name(decoder: Decoder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(300 * 2**30)
    files = Files([(str(path), 0) for path in sorted(tmp_path.iterdir())])
    for index, words in enumerate(("not a regular file", "not a regular file", "322,122,547,200 bytes")):
        with pytest.raises(UserError, match=f"^cannot read the image {files.name(index)}: it .*{words}"):
            open_image(files[index][0], "", False, decoder)


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
    with pytest.raises(UserError, match=r"^cannot read the image it: .*exceeds limit of 7998 pixels") as caught:
        open_image(BytesIO(data), "it", False, decoder)
    assert "\n" not in str(caught.value)


@DECODERS
def test_narrow_boxes_of_subsampled_noise(decoder: Decoder) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 19, 3), dtype=np.uint8))
    for subsampling in range(3):
        data = encoded(noise, subsampling=subsampling, quality=95)
        expected, image = oracle(data), open_image(BytesIO(data), "it", False, decoder)
        for left in range(19):
            for top in (0, 1, 7, 16):
                for width, height in ((1, 1), (1, 4), (2, 3), (19 - left, 4)):
                    right, bottom = min(19, left + width), top + height
                    pixels = image.crop((top, left, height, right - left))
                    np.testing.assert_array_equal(pixels, expected[top:bottom, left:right])


@DECODERS
def test_every_decoder_gives_the_same_halved_pixels(decoder: Decoder, photographs: list[Image.Image]) -> None:
    turned, small = Image.Exif(), Reading(shrink=50)
    turned[0x0112] = 6
    for photo in (photographs[0], photographs[1].resize((90, 61))):  # large and small
        for exif in (None, turned):
            data = encoded(photo, quality=90, **({"exif": exif} if exif else {}))
            expected = load_rgb(BytesIO(data), reading=small)
            upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
            assert (expected.width > expected.height) == (upright.width > upright.height)
            for whole in (True, False):
                image = open_image(BytesIO(data), "it", whole, decoder, small)
                assert image.size == expected.size
                np.testing.assert_array_equal(image.crop((0, 0, *image.size[::-1])), np.asarray(expected))


@DECODERS
def test_every_decoder_gives_the_same_grey_pixels(decoder: Decoder, files: dict[str, bytes]) -> None:
    grey, boxes = Reading(in_chans=1), random.Random(0)
    for name, data in files.items():
        expected = np.asarray(load_rgb(BytesIO(data), reading=grey))
        np.testing.assert_array_equal(expected[..., 0], np.asarray(load_rgb(BytesIO(data)).convert("L")))
        for whole in (True, False):
            image = open_image(BytesIO(data), name, whole, decoder, grey)
            height, width = expected.shape[:2]
            top, left = boxes.randrange(height), boxes.randrange(width)
            pixels = image.crop((top, left, height - top, width - left))
            np.testing.assert_array_equal(pixels, expected[top:, left:])
            assert pixels.flags.writeable


HUGE = """
import json, sys
from pathlib import Path
from torch.utils.data import DataLoader
from cait.extras.fast_input.decode import open_image

def mebibytes(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024

class Corners(list):
    def __getitem__(self, index):
        path, decoder = super().__getitem__(index)
        open_image("small.jpg", "", False, decoder).crop((0, 0, 8, 8))  # loads what is needed
        before = mebibytes("VmRSS")
        pixels = open_image(path, "", False, decoder).crop((8390, 11980, 10, 20))
        return pixels.tolist(), mebibytes("VmHWM") - before, mebibytes("VmRSS") - before

print(json.dumps(list(DataLoader(Corners(json.loads(sys.argv[1])), batch_size=None, num_workers=1))))
"""


@pytest.mark.slow
def test_a_huge_image_in_a_worker_leaves_no_memory_behind(tmp_path: Path) -> None:
    image = Image.new("RGB", (12_000, 8_400), (40, 90, 200))
    image.paste((250, 20, 10), (11_984, 8_384, 12_000, 8_400))
    image.save(tmp_path / "huge.jpg", subsampling=0)
    image.save(tmp_path / "huge.png", compress_level=1)
    image.crop((0, 0, 40, 30)).save(tmp_path / "small.jpg")
    # Mebibytes that the decoding may take: of 101 million pixels Pillow has 4 bytes each, and twice 3 in between.
    cases = [("huge.jpg", "nvimgcodec", 100), ("huge.jpg", "torchvision", 400), ("huge.png", "pillow", 1100)]
    if decode.choose("auto") != "nvimgcodec":
        del cases[0]
    (tmp_path / "script.py").write_text(HUGE.replace("sys.argv[1]", repr(json.dumps([case[:2] for case in cases]))))
    done = python("exec(open('script.py').read())", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = np.asarray(image.crop((11_980, 8_390, 12_000, 8_400)))
    for (path, decoder, most), (pixels, peak, kept) in zip(cases, json.loads(done.stdout), strict=True):
        assert np.abs(np.array(pixels) - expected).max() <= (3 if path == "huge.jpg" else 0)
        assert peak < most, (path, decoder)
        assert kept < 50, (path, decoder)


EVERY_KIND = """
import csv, json, sys
from pathlib import Path
import torch
from cait import ImageNetDataModule

backends, rows = BACKENDS, {}
batches = {}
for backend in backends:
    data = ImageNetDataModule(
        root="all", img_size=32, batch_size=8, num_workers=2, backend=backend, max_bad_share=0.5, mixup=0, cutmix=0
    )
    data.unreadable_path = Path(f"{backend}.csv")
    data.setup("fit")
    loader = data.train_dataloader()
    loader.batch_sampler.repeats, loader.batch_sampler.entries = 3, 3 * len(data.train_images)  # each of them
    batches[backend] = [images for images, _ in loader]
    rows[backend] = dict(csv.reader(open(f"{backend}.csv")))
assert all(images.isfinite().all() and images.shape == (8, 3, 32, 32) for one in batches.values() for images in one)
first, *others = (batches[backend] for backend in backends if backend != "timm")
same = [len(one) == len(first) and all(map(torch.equal, one, first)) for one in others]
print(json.dumps([len(first), same, rows]))
"""


def test_workers_outlive_every_kind_of_file_and_note_the_unreadable(files: dict[str, bytes], tmp_path: Path) -> None:
    jpeg, png = files["subsampling 2.jpg"], files["rgba.png"]
    bad = {
        "no byte.jpg": b"",
        "text.jpg": b"text" * 50,
        "header.jpg": jpeg[:300],
        "half.jpg": jpeg[: len(jpeg) // 2],
        "two bytes short.jpg": jpeg[:-2],
        "half progressive.jpg": files["progressive.jpg"][:1000],
        "half.png": png[: len(png) // 2],
        "damaged header.jpg": jpeg[:3] + b"\0" + jpeg[4:30] + b"\xff\xd9",
    }
    good = {name: data for name, data in files.items() if name != "first scans alone.jpg"}  # at which libjpeg speaks up
    for split, chosen in (("train", good | bad), ("val", {"rgb.jpg": files["rgb.jpg"], "rgba.png": png})):
        for number, (name, data) in enumerate(chosen.items()):
            path = tmp_path / "all" / split / f"class {number % 2}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    backends = ["torchvision", "pillow", "timm"] + ["nvimgcodec"] * (decode.choose("auto") == "nvimgcodec")
    (tmp_path / "script.py").write_text(EVERY_KIND.replace("BACKENDS", repr(backends)))
    done = script("script.py", tmp_path)
    assert done.returncode == 0, done.stderr
    known = re.compile(r"cannot read the image all/train/|\d+ images are there twice")
    about = [line for line in done.stderr.splitlines() if not known.match(line)]
    assert len(about) == len(backends)  # what each data module is; the decoders say nothing
    assert all(line.startswith("all: ") for line in about)
    count, same, noted = json.loads(done.stdout)
    assert count == 3 * (len(good) + len(bad)) // 8
    assert same == [True] * (len(backends) - 2)
    for backend, reasons in noted.items():
        assert {Path(path).name for path in reasons} == set(bad), backend
        assert all(reason.startswith("cannot read the image all/train/") for reason in reasons.values())
