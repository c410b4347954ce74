"""Shards of smaller images and of raw pixels: Pillow's pixels, from a disk and from S3, and never by mistake."""

import errno
import os
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from encoded_image import encoded
from PIL import ExifTags, Image, ImageOps

from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.reading import AS_SEEN, PUBLISHED, Reading, load_image
from cait.data.source import open_source
from cait.errors import UserError
from contrib.shards.pixels import as_png

SIDE = 40
XMP = b'<x:xmpmeta tiff:Orientation="6"></x:xmpmeta>'


def module(root: Path | str, **settings: Any) -> ImageNetDataModule:
    common = dict(img_size=32, batch_size=4, num_workers=0, repeats=1, max_bad_share=0.2)
    data = ImageNetDataModule(str(root), **(common | settings))
    data.setup("fit")
    return data


def make(root: Path, out: Path, *options: str) -> Path:
    main(["shards", str(root), str(out), "--images=3", "--workers=0", *options])
    return out


def batches(data: ImageNetDataModule) -> list[torch.Tensor]:
    return [images for images, _ in (*data.train_dataloader(), *data.val_dataloader())]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 2
    assert all(map(torch.equal, ours, theirs))


@pytest.fixture
def root(tmp_path: Path, photographs: list[Image.Image]) -> Path:
    """Images of 60 × 48 of many kinds, a small one, and a file that is none."""
    photo, small = photographs[0].resize((60, 48)), photographs[1].resize((SIDE, 31))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    upright = Image.Exif()
    upright[ExifTags.Base.Orientation] = 1
    clear = photo.convert("RGBA")
    clear.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 60).astype(np.uint8), (48, 1))))
    deep = Image.fromarray(np.arange(60 * 48, dtype=np.uint16).reshape(48, 60) * 20)
    files = {
        "clear.png": encoded(clear, "PNG"),
        "deep.png": encoded(deep, "PNG"),
        "gray.jpg": encoded(photo.convert("L"), quality=95),
        "none.jpg": b"<html>",
        "opaque.png": encoded(photo.convert("RGBA"), "PNG"),
        "photo.jpg": encoded(photo, quality=95),
        "small.jpg": encoded(small),
        "turned.jpg": encoded(photo, quality=95, exif=turned),
        "upright.jpg": encoded(photo, quality=95, exif=upright, xmp=XMP),
        "xmp.jpg": encoded(photo, quality=95, xmp=XMP),
    }
    for name, data in files.items():
        for place in ("train/a", "train/b", "val/a", "val/b"):
            (folder := tmp_path / "images" / place).mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return tmp_path / "images"


def opened(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data))


def stored_files(out: Path, split: str = "train") -> dict[str, bytes]:
    samples = getattr(open_source(str(out)), split)
    return {
        Path(samples.name(index)).name: samples[index][0].read() for index in range(len(samples))
    }


def test_large_images_are_made_smaller_and_nothing_else_is(root: Path, tmp_path: Path) -> None:
    out = make(root, tmp_path / "shards", f"--max_side={SIDE}")
    before = {path.name: path.read_bytes() for path in (root / "train/a").iterdir()}
    assert stored_files(out, "val") == before
    stored = stored_files(out)
    assert {name for name in stored if stored[name] == before[name]} == {"none.jpg", "small.jpg"}
    for name in stored.keys() - {"none.jpg", "small.jpg", "clear.png", "deep.png"}:
        with Image.open(root / "train/a" / name) as whole, opened(stored[name]) as ours:
            assert (ours.format, ours.size) == ("JPEG", (40, 32))
            tags = [image.getexif().get(ExifTags.Base.Orientation, 1) for image in (ours, whole)]
            assert tags == ([6, 6] if name in ("turned.jpg", "xmp.jpg") else [1, 1])
            expected = np.asarray(
                whole.convert(ours.mode).resize((40, 32), Image.Resampling.LANCZOS), float
            )
            assert abs(np.asarray(ours) - expected).mean() < 4
    with opened(stored["clear.png"]) as ours, Image.open(root / "train/a/clear.png") as whole:
        assert ours.format == "PNG"
        np.testing.assert_array_equal(ours, whole.resize((40, 32), Image.Resampling.LANCZOS))
    assert np.asarray(opened(stored["deep.png"])).max() > 200  # scaled from 16 bits, not cut off


@pytest.mark.parametrize("published", [False, True])
def test_raw_pixels_are_those_that_a_run_on_the_folder_reads(
    published: bool, root: Path, tmp_path: Path
) -> None:
    written = ["--exif_orientation=false", "--background=null"] if published else []
    read: dict[str, Any] = dict(exif_orientation=False, background=None) if published else {}
    out = make(root, tmp_path / "raw", "--raw", *written)
    stored, folder = stored_files(out), root / "train/a"
    assert stored["none.jpg"] == b"<html>"
    assert stored["photo.jpg"].startswith(b"P6\n60 48\n255\n")
    with Image.open(folder / "turned.jpg") as turned:
        np.testing.assert_array_equal(
            opened(stored["turned.jpg"]), turned if published else ImageOps.exif_transpose(turned)
        )
    with Image.open(folder / "clear.png") as clear:
        on_white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
        expected = np.asarray((clear if published else on_white).convert("RGB"), float)
    assert abs(np.asarray(opened(stored["clear.png"])) - expected).max() <= (0 if published else 1)
    assert_equal(batches(module(out, **read)), batches(module(root, **read)))
    for backend in ("auto", "timm"):
        repeated = dict(backend=backend, repeats=3) | read
        assert_equal(batches(module(out, **repeated)), batches(module(root, **repeated)))
    other = "exif_orientation true" if not published else "exif_orientation false"
    with pytest.raises(
        UserError, match=f"are of {other}, the run has .*: give --data.{other}, or make"
    ):
        module(out, exif_orientation=published)


def test_raw_pixels_of_smaller_images_are_pillows(root: Path, tmp_path: Path) -> None:
    out = make(root, tmp_path / "raw", "--raw", f"--max_side={SIDE}")
    with Image.open(root / "train/a/photo.jpg") as photo:
        expected = photo.resize((40, 32), Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(opened(stored_files(out)["photo.jpg"]), expected)


def test_a_run_says_what_it_reads_and_does_not_go_on_with_other_pixels(
    root: Path, tmp_path: Path
) -> None:
    whole, small = (
        module(make(root, tmp_path / "whole")),
        module(make(root, tmp_path / "small", f"--max_side={SIDE}")),
    )
    assert whole.state_dict() == module(root).state_dict()
    saved = whole.state_dict()
    state = dict(
        training=True, global_rank=0, world_size=1, accumulate_grad_batches=1, callbacks=[]
    )
    whole.trainer = small.trainer = SimpleNamespace(**state)
    whole.load_state_dict(saved)
    with pytest.raises(UserError, match="digest of the training pictures' names was"):
        small.load_state_dict(saved)


def test_a_failing_disk_ends_the_run_in_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = module(make(root, tmp_path / "shards"))

    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(
        UserError, match=r"^cannot read .*/train/chunk-0-\d\.bin: Input/output error$"
    ):
        data.train_images[(0, 5, 0)]
    assert not data.unreadable.seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max_side=0"], "max_side must be at least 1"),
        (["--max_side=40", "--quality=101"], "quality must be in [1, 100], got 101"),
        (["--quality=90"], "--quality is for --max_side without --raw"),
        (["--raw", "--quality=90"], "--quality is for --max_side without --raw"),
        (
            ["--max_side=40", "--background=white"],
            "--exif_orientation and --background are for --raw",
        ),
        (["--raw", "--background=whit"], "background must be a color"),
    ],
)
def test_options_that_cannot_be_are_told(
    options: list[str], words: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        make(root, tmp_path / "shards", *options)
    assert stop.value.code == 2
    assert words in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


def test_decoded_images_keep_their_alpha_channel_and_orientation_in_shards(
    photographs: list[Image.Image],
) -> None:
    art = photographs[0].resize((40, 30)).convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(art.size))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 8
    file = BytesIO()
    art.save(file, "WEBP", lossless=True, exact=True, exif=turned)
    kept = as_png(Image.open(file), "it")
    assert kept.startswith(b"\x89PNG")
    for reading in (AS_SEEN, PUBLISHED, Reading(background="red")):
        assert (
            load_image(BytesIO(kept), "it", reading).tobytes()
            == load_image(file, "it", reading).tobytes()
        )
        file.seek(0)
