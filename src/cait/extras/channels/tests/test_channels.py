"""Planes: read to the bit beside the libraries' own readers, learned from, resumed, exported."""

import lzma
import struct
import sys
import tracemalloc
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from harness import REPO, rows
from PIL import ExifTags, Image
from same import same
from timm.data import create_transform

import cait
from cait import plain
from cait.cli import main
from cait.data import datamodule
from cait.data.dataset import seed_generators
from cait.data.reading import load_image
from cait.data.transforms import Preprocessing
from cait.errors import UserError
from cait.extras.channels import CHANNELS, holds_planes, settings_for
from cait.extras.channels import planes as of_planes
from cait.extras.channels.planes import numbers, read
from cait.extras.channels.preprocessing import PlanesReading

tifffile, pydicom = pytest.importorskip("tifffile"), pytest.importorskip("pydicom")
READER = "cait.extras.channels.planes:read"
DRAWN = np.random.default_rng(0)
FIVE = DRAWN.integers(0, 2**16, (6, 9, 5), dtype=np.uint16)
AS_BEFORE = ("reader", "reader_args", "mean", "std")
FLOATS, PAGES = FIVE / np.float32(7), np.moveaxis(FIVE, 2, 0)
DICOM = Path(pydicom.__file__).parent / "data/test_files"


def tiff(planes: np.ndarray, **how: Any) -> bytes:
    file = BytesIO()
    tifffile.imwrite(file, planes, **{"photometric": "minisblack", "planarconfig": "contig"} | how)
    return file.getvalue()


def npy(planes: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, planes)
    return file.getvalue()


def png(planes: np.ndarray) -> bytes:
    """A PNG file of 16 bits, of uint16 [height, width, 1 or 3]; Pillow writes none in color."""
    height, width, channels = planes.shape
    head = struct.pack(">IIBBBBB", width, height, 16, 0 if channels == 1 else 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in planes)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        file += (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
    return file


FILES: dict[str, tuple[bytes, np.ndarray]] = {
    "interleaved, 16 bits": (tiff(FIVE), FIVE),
    "planar, 8 bits": (
        tiff(PAGES.astype(np.uint8), planarconfig="separate"),
        FIVE.astype(np.uint8),
    ),
    "compressed floats, big-endian": (tiff(FLOATS, compression="zlib", byteorder=">"), FLOATS),
    "a page each": (tiff(PAGES, planarconfig=None), FIVE),
    "channels last": (npy(FIVE), FIVE),
    "channels first": (npy(PAGES), FIVE),
    "more channels than pixels": (npy(FIVE.swapaxes(1, 2)), FIVE.swapaxes(1, 2)),
    "one channel, half floats": (
        npy((FIVE[..., 0] // 9).astype(np.float16)),
        (FIVE[..., :1] // 9).astype(np.float16),
    ),
    "PNG in color": (png(FIVE[..., :3]), FIVE[..., :3]),
    "gray PNG": (png(FIVE[..., :1]), FIVE[..., :1]),
}


@pytest.mark.parametrize("kind", FILES)
def test_numbers_are_those_of_the_file(kind: str) -> None:
    data, planes = FILES[kind]
    most = np.iinfo(planes.dtype).max if planes.dtype.kind == "u" else 1
    assert np.array_equal(numbers(data, planes.shape[2]), (planes / most).astype(np.float32))


def test_what_numbers_stand_for_is_known_or_refused(tmp_path: Path) -> None:
    gray, exif = FIVE[..., 0] // 256, Image.Exif()
    assert np.array_equal(
        numbers(tiff(gray.astype(np.uint8), photometric="miniswhite"), 1)[..., 0],
        (255 - gray) / np.float32(255),
    )
    colors = np.zeros((3, 256), np.uint16)
    Image.fromarray(gray.astype(np.uint8)).convert("P").save(tmp_path / "p.png")
    for file in (
        tiff(gray.astype(np.uint8), photometric="palette", colormap=colors),
        (tmp_path / "p.png").read_bytes(),
    ):
        with pytest.raises(ValueError, match="its colors are in a palette"):
            numbers(file, 1)
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(gray.astype(np.uint8)).save(tmp_path / "turned.png", exif=exif)
    for upright, size in ((True, (1, 9, 6)), (False, (1, 6, 9))):
        assert (
            read(tmp_path / "turned.png", PlanesReading(upright, reader=READER, in_chans=1)).shape
            == size
        )


def deflated_dicom(zeros: int) -> bytes:
    """A DICOM file whose content is deflated, with so many zeros in a private element."""
    image, file = pydicom.dcmread(DICOM / "CT_small.dcm"), BytesIO()
    image.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    image.add_new((0x7FE1, 0x1010), "OB", bytes(zeros))
    image.save_as(file)
    return file.getvalue()


def strip(compression: int, packed: bytes, tile: int = 0) -> bytes:
    """A TIFF file of 10 × 10 pixels in one strip, or one tile of another size."""
    ends = [(322, tile), (323, tile), (324, 8), (325, len(packed))]
    if not tile:
        ends = [(273, 8), (278, 10), (279, len(packed))]
    tags = [(256, 10), (257, 10), (258, 8), (259, compression), (262, 1), (277, 1), *ends]
    packed += bytes(len(packed) % 2)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags))
    return (
        struct.pack("<4sI", b"II*\0", 8 + len(packed))
        + packed
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )


ZEROS = 1 << 26
PACKED = {
    "deflate": strip(8, zlib.compress(bytes(ZEROS))),
    "lzma": strip(34925, lzma.compress(bytes(ZEROS))),
    "packbits": strip(32773, b"\x81\0" * (ZEROS >> 7)),
}


@pytest.mark.parametrize("kind", PACKED)
def test_no_more_of_a_strip_is_unpacked_than_its_image_has(kind: str) -> None:
    numbers(PACKED[kind], 1)  # what is imported stays
    tracemalloc.start()
    shape = numbers(PACKED[kind], 1).shape
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (shape, taken < ZEROS / 4) == ((10, 10, 1), True)


def gif() -> bytes:
    file = BytesIO()
    images = [Image.new("L", (9, 9), shade) for shade in (1, 2)]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:])
    return file.getvalue()


def test_a_damaged_png_is_an_error() -> None:
    """torchvision would end the process."""
    data = png(FIVE[..., :3])
    start = data.index(b"IDAT") + 4
    lines = b"\x09" + zlib.decompress(data[start:-16])[1:]  # no such filter
    packed = zlib.compress(lines)
    chunk = b"IDAT" + packed
    damaged = data[: start - 8] + struct.pack(">I", len(packed)) + chunk
    damaged += struct.pack(">I", zlib.crc32(chunk)) + data[-12:]
    with pytest.raises(OSError, match="data stream"):
        numbers(damaged, 3)


TOO_MUCH = "would take far more memory"
BOMBS = {
    "deflated DICOM": (deflated_dicom(1 << 22), TOO_MUCH),
    "a tile": (strip(8, zlib.compress(bytes(99)), 60_000), TOO_MUCH),
    "an image": (tiff(np.zeros((600, 600, 5), np.uint8), compression="zlib"), TOO_MUCH),
    "PNG": (png(np.zeros((900, 900, 1), np.uint16)), TOO_MUCH),
    "pages": (tiff(np.zeros((60, 2, 2), np.uint8), planarconfig=None), "60 pages are more than 50"),
    "an animation": (gif(), "palette"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_what_a_file_takes_is_known_before_it_is_unpacked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words = BOMBS[kind]
    assert kind != "deflated DICOM" or numbers(deflated_dicom(0), 1).shape == (128, 128, 1)
    monkeypatch.setattr(plain, "FLOOR", 1 << 20)
    monkeypatch.setattr(of_planes, "MOST_PAGES", 50)
    with pytest.raises(ValueError, match=words):
        numbers(data, 1)


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_float32_is_missing() -> None:
    np.save(file := BytesIO(), np.array([[[1e300, 2.0]]]))
    assert np.array_equal(numbers(file.getvalue(), 2), [[[np.nan, 2.0]]], equal_nan=True)


def test_a_reader_of_ones_own_returns_planes_of_the_networks_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UserError, match=r"the reader operator:is_ must return a tensor .*, not bool"
    ):
        load_image("x.png", reading=PlanesReading(reader="operator:is_"))
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(read=lambda *_: torch.zeros(1, 4, 4)))
    with pytest.raises(UserError, match="cannot read the image a: it has 1 channels, not 3"):
        load_image("a", reading=PlanesReading(reader="own:read"))


def test_without_the_extra_a_run_of_planes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = cait.ImageNetDataModule(img_size=8)
    data.check_prepares({"preprocessing": {"reader": READER}})
    monkeypatch.setattr(datamodule, "PREPARATION", Preprocessing)
    with pytest.raises(
        UserError, match=r"the run reads images by cait.*, which needs an extra that is not here"
    ):
        data.check_prepares({"preprocessing": {"reader": READER}})


CASES = (
    "CT_small",
    "MR_small",
    "MR_small_RLE",
    "MR_small_bigendian",
    "JPEG2000",
    "SC_rgb_rle_16bit",
    "liver_1frame",
)


@pytest.mark.parametrize("name", CASES)
def test_dicom_is_as_pydicom_rescales_it(name: str) -> None:
    held = pydicom.dcmread(DICOM / f"{name}.dcm")
    expected = held.pixel_array * float(held.get("RescaleSlope", 1)) + float(
        held.get("RescaleIntercept", 0)
    )
    assert np.array_equal(
        numbers((DICOM / f"{name}.dcm").read_bytes(), 1), np.atleast_3d(expected).astype(np.float32)
    )


def test_a_window_the_least_number_as_white_and_padding() -> None:
    held, copy = pydicom.dcmread(DICOM / "CT_small.dcm"), BytesIO()
    stored = held.pixel_array.copy()
    stored[0, 0] = held.PixelPaddingValue
    held.PixelData, held.PhotometricInterpretation = stored.tobytes(), "MONOCHROME1"
    held.save_as(copy)
    plain, windowed = (
        numbers(copy.getvalue(), 1, window=window)[..., 0] for window in (None, [40, 400])
    )
    assert np.isnan(plain).sum() == np.isnan(windowed).sum() == 1
    units, inner = stored.astype(int) + int(held.RescaleIntercept), ~np.isnan(plain)
    # the ends of 16 bits add up to -1
    assert (plain == -1 + 2 * held.RescaleIntercept - units)[inner].all()
    # PS3.3 C.11.2.1.2.1
    assert ((windowed == np.nanmin(windowed)) == (units >= 40 - 0.5 + 399 / 2))[inner].all()
    with pytest.raises(ValueError, match="no window"):
        numbers((DICOM / "CT_small.dcm").read_bytes(), 1, window="file")


def test_missing_numbers_are_counted_and_become_the_mean(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    planes = DRAWN.random((8, 8, 5)).astype(np.float32)
    planes[0, 0], planes[1, 1, 0], planes[2, 2, 1], planes[3, 3, 2:4] = (
        -9999,
        np.nan,
        np.inf,
        [9.96921e36, -3.4e38],
    )
    for name in ("train/a/0", "train/b/0", "val/a/0", "val/b/0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / f"{name}.tif").write_bytes(
            tiff(planes, extratags=[(42113, "s", 0, "-9999", True)])
        )
    (tmp_path / "train/b/1.tif").write_bytes(tiff(planes[..., :4]))
    added = settings_for(set(), {"data.root": str(tmp_path)})
    known = np.where((planes >= 0) & (planes < 1e30), planes, np.nan).astype(float)
    assert np.allclose(added["data.mean"], np.nanmean(known, axis=(0, 1)))
    assert np.allclose(added["data.std"], np.nanstd(known, axis=(0, 1)))
    told = capfd.readouterr().err
    assert (
        "5 channels, mean and deviation of 2 of 3 training images; 18 numbers (2.8%) are missing"
        in told
    )
    assert "train/b/1.tif: it has 4 channels, not 5" in told
    settings = {name.split(".")[-1]: value for name, value in added.items()}
    data = cait.ImageNetDataModule(str(tmp_path), img_size=8, **settings)
    data.setup("validate")
    assert (data.val_images[0][0][:, 0, 0] == 0).all()
    with pytest.raises(UserError, match="auto_augment and color_jitter are for RGB"):
        cait.ImageNetDataModule(str(tmp_path), **settings | {"auto_augment": "3a"}).setup("fit")


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_training_is_timms_crop_mirror_and_erasing(fit: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", FIVE)
    shared: dict[str, Any] = dict(auto_augment=None, color_jitter=None, scale=(0.5, 1.0))
    statistics = dict(mean=[0.1, 0.2, 0.3, 0.4, 0.5], std=[0.5, 0.4, 0.3, 0.2, 0.1])
    data = cait.ImageNetDataModule(
        img_size=16, in_chans=5, reader=READER, fit=fit, erase_prob=1, **shared, **statistics
    )
    planes = data.settings.open(tmp_path / "x.npy", "", False)
    seed_generators(1)
    pixels, whole = data.train_transform(planes), data.eval_transform(planes)
    assert pixels.shape == whole.shape == (5, 16, 16)
    assert (whole[:, 0] == 0).all() == (fit == "pad")
    if fit == "crop":
        how = dict(interpolation="bicubic", re_prob=1.0, re_mode="pixel", **shared, **statistics)
        seed_generators(1)
        assert torch.allclose(
            pixels, create_transform((5, 16, 16), is_training=True, **how)(planes), atol=1e-4
        )


def test_a_folder_says_that_it_holds_planes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert not holds_planes(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", FIVE)
        np.save(tmp_path / name / "1.npy", FIVE)
    assert holds_planes(tmp_path)
    main(["check", str(tmp_path)])
    assert "decoded 4 images as planes" in capsys.readouterr().out
    (tmp_path / "a/0.tif").write_bytes(tiff(FIVE))
    assert holds_planes(tmp_path)
    for name in ("a/0.tif", "a/1.tif", "b/0.tif", "b/1.tif"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "a/-.tif").write_bytes(b"")
    assert not holds_planes(tmp_path)
    (tmp_path / "a/-.tif").unlink()
    assert settings_for(set(), {"data.root": str(tmp_path)}) == {}
    with pytest.raises(UserError, match=r"0\.tif: it has 3 channels, not 4"):
        settings_for(set(), {"data.root": str(tmp_path), CHANNELS: 4})


@pytest.fixture
def fit(photographs: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save tiles of photographs, as `save(path, tile, label)` does, in two classes; returns what trains on them."""
    monkeypatch.chdir(tmp_path)
    photos, draw = [np.asarray(image) / 255 for image in photographs], np.random.default_rng(0)

    def written(save: Any) -> Any:
        for number in range(160):
            top, left = draw.integers(400, size=2)
            place = Path("tiles", "train" if number < 128 else "val", "ab"[number // 2 % 2])
            place.mkdir(parents=True, exist_ok=True)
            save(
                place / str(number),
                photos[number % 2][top : top + 16, left : left + 16],
                number // 2 % 2,
            )
        fields = "--model.fields={patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}"
        words = [
            f"--config={REPO / 'configs/digits.yaml'}",
            fields,
            "--data.num_workers=0",
            "--trainer.max_epochs=8",
        ]
        return lambda name, *more: main(
            ["fit", "--data.root=tiles", f"--run_name={name}", *words, *CPU, *more]
        )

    return written


CPU = ("--trainer.accelerator=cpu", "--trainer.devices=1")


def accuracy(run: str) -> float:
    return max(float(row["val/acc1"]) for row in rows(Path("logs", run)) if row["val/acc1"])


@pytest.mark.slow
def test_five_bands_are_learned_scored_resumed_and_exported(
    fit: Any, capfd: pytest.CaptureFixture
) -> None:
    def save(path: Path, tile: np.ndarray, label: int) -> None:
        gray = tile.mean(axis=2)
        planes = np.dstack([tile, gray, (gray + label) / 2])
        path.with_suffix(".tif").write_bytes(tiff(np.rint(65535 * planes).astype(np.uint16)))

    train = fit(save)
    train("five")
    train("three", "--data.reader_args={bands: [0, 1, 2]}")
    assert accuracy("three") <= 75
    train("again", "--from=three", "--trainer.max_epochs=1")
    kept, before = (
        yaml.safe_load(Path(f"logs/{name}/config.yaml").read_text()) for name in ("again", "three")
    )
    assert [kept["data"][name] for name in AS_BEFORE] == [
        before["data"][name] for name in AS_BEFORE
    ]
    assert accuracy("five") >= 95
    files, loaded = sorted(Path("tiles/val").glob("*/*.tif")), cait.load("logs/five")
    found = [best for best, *_ in loaded.predict([*files], top_k=1)]
    right = np.mean(
        [best["class"] == file.parent.name for best, file in zip(found, files, strict=True)]
    )
    assert 100 * right == pytest.approx(accuracy("five"))
    main(["export", "five", "--format=onnx"])
    session = pytest.importorskip("onnxruntime").InferenceSession("logs/five/export/model.onnx")
    logits = session.run(
        ["logits"], {"images": torch.stack([loaded.transform(file) for file in files]).numpy()}
    )[0]
    exported = torch.tensor(logits).softmax(dim=1).amax(dim=1)
    assert torch.allclose(
        exported, torch.tensor([best["probability"] for best in found]), atol=1e-5
    )
    Path("bad.tif").write_bytes(tiff(FIVE[..., :4]))
    main(["predict", "logs/five/checkpoints/best.ckpt", "bad.tif", str(files[0])])
    assert "cannot read bad.tif: it has 4 channels, not 5" in capfd.readouterr().err
    main(["visualize", "five", "--num_images=1"])
    assert "channels 0, 1 and 2" in Path("logs/five/visualize/index.html").read_text()
    for name, steps in {"whole": 7, "parts": 6}.items():  # an epoch is four
        train(
            name,
            "--model.schedule=constant",
            "--model.warmup_epochs=0",
            f"--trainer.max_steps={steps}",
        )
    main(["resume", "parts", "--trainer.max_steps=7"])
    assert same(
        *(
            torch.load(f"logs/{name}/checkpoints/last.ckpt")["state_dict"]
            for name in ("whole", "parts")
        )
    )


def test_the_low_byte_alone_tells_two_classes(fit: Any) -> None:
    def save(path: Path, tile: np.ndarray, label: int) -> None:
        low = np.rint(255 * tile.mean(axis=2, keepdims=True)).astype(np.uint16)
        path.with_suffix(".png").write_bytes(png(256 + low // 2 + 127 * label))

    train = fit(save)
    train("sixteen", f"--data.reader={READER}")
    train("eight", "--trainer.max_epochs=1")
    assert accuracy("sixteen") >= 95
    assert accuracy("eight") == 50


@pytest.mark.slow
def test_a_folder_of_dicom_has_a_recipe_of_its_own(fit: Any, capfd: pytest.CaptureFixture) -> None:
    def save(path: Path, tile: np.ndarray, label: int) -> None:
        held = pydicom.dcmread(DICOM / ("CT_small.dcm", "MR_small.dcm")[label])
        held.PixelData = np.roll(held.pixel_array, DRAWN.integers(64), axis=1).tobytes()
        held.save_as(path.with_suffix(".dcm"))

    fit(save)
    short = ["--trainer.max_epochs=4", "--minutes=0.2", "--data.img_size=32", *CPU]
    main(["fit", "--data.root=tiles", "--run_name=scans", *short])
    assert accuracy("scans") >= 95
    main(["check", "tiles"])
    assert "decoded 160 images as planes" in capfd.readouterr().out
