"""The embedded digits, image folders good and bad, and Mixup and CutMix against timm's."""

import dataclasses
import hashlib
import os
import re
import struct
import zlib
from io import BytesIO, UnsupportedOperation
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from modules import images_in, module, trainer
from PIL import ExifTags, Image, ImageOps
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor

from cait import seeds
from cait.data import reading
from cait.data.datamodule import PREPARATION, ImageNetDataModule
from cait.data.dataset import NO_LABEL
from cait.data.folder import scan_flat
from cait.data.reading import UnreadableImages, load_image
from cait.data.source import open_source
from cait.errors import UserError
from cait.guards.nonfinite import UnreadableReport


def test_digits_are_scikit_learns_every_one_once(digits_root: Path) -> None:
    digits = load_digits()
    seen = {}
    for path in digits_root.glob("*/*/*.png"):
        pixels = np.asarray(Image.open(path))
        number = int(path.stem)
        assert path.parent.name == str(digits.target[number])
        assert np.array_equal(np.round(pixels * (16 / 255)), digits.images[number])
        seen[number] = path.parts[-3]
    assert sorted(seen) == list(range(1797))
    shares = [
        sum(seen[n] == "val" for n in np.flatnonzero(digits.target == label)) for label in range(10)
    ]
    assert sum(shares) == 360
    assert min(shares) >= 35  # stratified
    assert max(shares) <= 37


@pytest.mark.filterwarnings("error")
def test_images_of_every_mode_go_through_the_whole_recipe(mixed_root: Path) -> None:
    data = images_in(mixed_root, repeats=1)
    data.setup("fit")
    assert data.class_names == ["cat", "dog", "owl"]
    images = torch.cat([images for images, _ in data.train_dataloader()])
    assert images.shape == (36, 3, 32, 32)
    assert images.isfinite().all()
    assert (
        torch.cat([labels for _, labels in data.val_dataloader()]).tolist()
        == [0] * 5 + [1] * 5 + [2] * 5
    )


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_and_smoothing_are_timms(mixed_root: Path, mode: str) -> None:
    data = images_in(mixed_root, mix_mode=mode, seed=5)
    data.setup("fit")
    data.trainer = Trainer(
        logger=False, enable_checkpointing=False, barebones=False, enable_progress_bar=False
    )
    data.trainer.training = True
    theirs = Mixup(
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        switch_prob=0.5,
        mode=mode,
        label_smoothing=0.1,
        num_classes=3,
    )
    used = set()
    for step in range(12):
        data.trainer.fit_loop.epoch_loop.batch_progress.current.ready = step
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4,))
        np.random.seed(seeds.batch_mixing(5, 0, step, 0))
        expected_images, expected_targets = theirs(images.clone(), labels)
        got_images, got_targets = data.on_after_batch_transfer((images.clone(), labels), 0)
        assert torch.equal(got_images, expected_images)
        # effective
        assert torch.allclose(0.9 * got_targets + 0.1 / 3, expected_targets, rtol=0, atol=1e-6)
        used.add(
            "cutmix"
            if torch.isin(got_images[0], torch.cat([images[0], images[3]])).all()
            else "mixup"
        )
        logits = torch.randn(4, 3)
        ours = torch.nn.functional.cross_entropy(logits, got_targets, label_smoothing=0.1)
        assert ours.item() == pytest.approx(
            SoftTargetCrossEntropy()(logits, expected_targets).item(), rel=1e-6
        )
    assert used == {"cutmix", "mixup"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(auto_augment="rond-m9"), "auto_augment"),
        (dict(crop_pct=0), "crop_pct"),
        (dict(val_fraction=1), "val_fraction"),
        (dict(mean=[0.5]), "mean and std take three"),
        (dict(mean=[0.1, 0.2, 0.3], in_chans=1), "mean and std take one number each"),
        (
            dict(in_chans=2),
            r"--model.fields.in_chans 2: images have 3 channels \(RGB\) or 1 \(gray\)",
        ),
        (dict(scale=(1.0, 0.08)), r"scale is a range, the smaller first, got \[1.0, 0.08\]"),
        (dict(mix_mode="element"), "mix_mode must be one of batch, pair, elem"),
        (dict(balance="half"), "balance must be one of sqrt, full, null"),
        (dict(interpolation="cubic"), "interpolation must be one of nearest, .*got 'cubic'"),
        (
            dict(background="whit"),
            "background must be a color, as white or '#8090a0', or null; got",
        ),
    ],
)
def test_bad_settings_are_told(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        images_in(tmp_path, **settings)
    images_in(tmp_path, batch_size=5, mixup=0, cutmix=0)


def test_too_few_images_are_told(mixed_root: Path) -> None:
    data = images_in(mixed_root, batch_size=64, repeats=1)
    data.setup("fit")
    with pytest.raises(UserError, match="lower --data"):
        data.train_dataloader()
    data.trainer = SimpleNamespace(global_rank=15, world_size=16, num_devices=16)
    with pytest.raises(UserError, match="15 images cannot be shared out over 16 processes"):
        data.predict_dataloader()
    [(images, labels)] = data.val_dataloader()  # it adds up the metrics with the others
    assert labels.tolist() == [NO_LABEL]
    assert not images.any()


def test_a_checkpoint_holds_the_classes_as_they_were_first_listed(mixed_root: Path) -> None:
    data, other_path = (
        images_in(mixed_root),
        images_in(f"{mixed_root.parent}/./mixed/").state_dict(),
    )
    assert data.num_classes == 3  # the model's head is made
    (mixed_root / "train" / "bat").mkdir()
    data.setup("fit")
    state = data.state_dict()
    assert state == other_path
    assert state["class_names"] == data.class_names == ["cat", "dog", "owl"]
    names = "".join(
        f"{path[len(str(mixed_root)) + 1 :]}\n" for path, _ in data.train_images.samples
    )
    expected = hashlib.sha256(names.encode()).hexdigest()[:16]
    assert state["depends_on"]["digest of the training pictures' names"] == expected
    data.load_state_dict(state)
    (mixed_root / "train" / "owl").rename(mixed_root / "train" / "own")
    named = images_in(mixed_root, class_names=["bat", "cat"])
    assert named.class_names == ["bat", "cat"]
    for wrong in (named, images_in(mixed_root, class_names=["own", "dog", "cat", "bat"])):
        with pytest.raises(
            UserError, match=r"class_names has . names, .* has bat, .*; leave it out"
        ):
            wrong.setup()
    with pytest.raises(
        UserError, match=r"3 classes are not the 4 of .*: missing: owl; unknown: bat, own$"
    ):
        images_in(mixed_root).load_state_dict(state)


COMPARED = {
    "class of the data module",
    "seed",
    "repeats",
    "pixels by",
    "images a batch, over all processes",
    "batches accumulated, by epoch",
    "training pictures",
    "digest of the training pictures' names",
    "validation pictures",
    "digest of the validation pictures' names",
    "order of the images",
}
PREPARED = {field.name for field in dataclasses.fields(PREPARATION)}
STEPS: dict[str, Any] = {
    "images a batch, over all processes": 64,
    "batches accumulated, by epoch": {0: 16},
}
"""Facts that count as one: the images of a step, here 64 in place of 4."""


@pytest.mark.parametrize("name", sorted(COMPARED | PREPARED))
def test_each_fact_of_the_data_alone_refuses_a_checkpoint(name: str, mixed_root: Path) -> None:
    data = images_in(mixed_root, backend="timm")
    saved = data.state_dict()
    data.trainer = SimpleNamespace(
        training=True, global_rank=0, world_size=1, accumulate_grad_batches=1, callbacks=[]
    )
    data.load_state_dict(saved)
    saved["depends_on" if name in COMPARED else "preprocessing"][name] = STEPS.get(name, "another")
    words = (
        "images a step, by epoch was {0: 64}, is " if name in STEPS else f"{name} was another, is "
    )
    with pytest.raises(UserError, match=re.escape(words)):
        data.load_state_dict(saved)


def test_a_checkpoint_of_other_data_seed_or_batch_is_refused(mixed_root: Path) -> None:
    def trained(accumulated: int = 1, **settings: Any) -> ImageNetDataModule:
        data = images_in(mixed_root, **settings)
        data.trainer = SimpleNamespace(
            training=True,
            global_rank=0,
            world_size=1,
            accumulate_grad_batches=accumulated,
            callbacks=[],
        )
        return data

    saved = trained().state_dict()
    trained().load_state_dict(saved)
    trained(batch_size=2, accumulated=2).load_state_dict(saved)  # as on half the processes
    for other, words in (
        (trained(seed=7), "seed was 0, is 7; to continue anyway add --data.check_resume false"),
        (trained(crop_pct=0.5), "crop_pct was 1.0, is 0.5"),
        (trained(batch_size=8), "images a step, by epoch was {0: 4}, is {0: 8}"),
        (trained(accumulated=2), "images a step, by epoch was {0: 4}, is {0: 8}"),
        (trained(val_split="train", train_split="val"), "training pictures was 36, is 15"),
        (trained(val_split="train"), "validation pictures was 15, is 36"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            other.load_state_dict(saved)
    trained(seed=7, check_resume=False).load_state_dict(saved)


def test_images_are_found_from_a_folder_beside(
    mixed_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    data = images_in("../mixed")
    data.setup("fit")
    assert len(data.train_images) == 36
    assert len(scan_flat(Path("../mixed/val"))) == 15


@pytest.mark.parametrize("overfit_batches", [2, 0.0])
def test_overfitting_sees_the_same_batches_each_epoch(
    mixed_root: Path, overfit_batches: float
) -> None:
    seen: list[Tensor] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda fit, net, batch, index: seen.append(batch[0])
    )
    limits: dict = {} if overfit_batches else dict(limit_train_batches=2, limit_val_batches=0)
    fit = trainer(
        overfit_batches=overfit_batches,
        max_epochs=2,
        callbacks=[watch],
        num_sanity_val_steps=0,
        **limits,
    )
    fit.fit(module(img_size=32, num_classes=3), datamodule=images_in(mixed_root))
    first, second, again, _ = seen
    assert torch.equal(first, again) is bool(overfit_batches)
    assert not torch.equal(first, second)


def test_the_embedded_data_set_appears_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/digits").mkdir(parents=True)
    data = ImageNetDataModule(root="data/digits", img_size=16, batch_size=32, num_workers=0)
    assert data.num_classes == 10  # known before it is written, because the model is built first
    data.setup("fit")
    assert data.num_classes == len(list(Path("data/digits/train").iterdir())) == 10
    assert len(data.train_images) == 1437


def laid_out(root: Path, files: str, links: dict[str, str] | None = None) -> None:
    """Images under names, each with pixels of its own, and links."""
    for number, name in enumerate(files.split()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / name)
    for link, target in (links or {}).items():
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(target)


TWO_CLASSES = "a/1.png a/2.png a/3.png b/1.png b/2.png b/3.png"
TWO_FOLDERS = "train/a/1.png train/b/1.png val/a/2.png val/b/2.png"


@pytest.mark.parametrize(
    ("files", "links", "expected"),
    [
        (TWO_CLASSES, {"a/again": ".", "a/once_more": ".", "a/x/y": "../../a"}, ["a", "b"]),
        (TWO_CLASSES, {"c": "b"}, "{root}/b and {root}/c are one folder, under two classes"),
        (
            TWO_CLASSES,
            {"a/up": ".."},
            "{root}/a/up/b and {root}/b are one folder, under two classes",
        ),
        (TWO_CLASSES, {"a/4.png": "1.png", "b/4.png": "nowhere", "gone": "nowhere"}, ["a", "b"]),
        ("Bus/1.png Bus/2.png Train/1.png Train/2.png", {}, ["Bus", "Train"]),
        (
            "Bus/1.png Bus/2.png Train/1.png Train/2.png Test/1.png Test/2.png",
            {},
            ["Bus", "Test", "Train"],
        ),
        ("Validation/1.png Validation/2.png Test/1.png Test/2.png", {}, ["Test", "Validation"]),
        (TWO_FOLDERS.replace("train", "Train").replace("val", "TEST"), {}, ["a", "b"]),
        ("Train/1.png Train/2.png Test/1.png Test/2.png", {}, "Train holds 0 class folder"),
        (
            "train/a/1.png train/b/1.png val/1.png",
            {},
            "not hold .* class folders: a, b; give --data.root {root}/train",
        ),
        (
            "train/cr\u00e8me/1.png train/b/1.png val/cre\u0300me/2.png val/b/1.png",
            {},
            ["b", "cr\u00e8me"],
        ),
        (
            "cr\u00e8me/1.png cr\u00e8me/2.png cre\u0300me/1.png b/1.png",
            {},
            "two folders called cr.*me",
        ),
        (
            "a/1.png a/2.png K\udce4se/1.png K\udce4se/2.png",
            {},
            "the class folder .*K�se is not UTF-8: rename it",
        ),
        ("train/a/1.png val/a/2.png", {}, "train holds 1 class folder.*, at least 2 are needed"),
        (
            "train/a/1.png train/b/1.png",
            {},
            "val does not exist; .* --data.root .* or .* --data.train_split none",
        ),
        (
            "bus/a/1.png bus/b/2.png val/a/1.png val/b/2.png",
            {},
            "if val is a class add --data.val_split none",
        ),
        (TWO_CLASSES, {"#recycle": "a", "a/@Recycle": "../b", "lost+found": "b"}, ["a", "b"]),
        (
            TWO_FOLDERS.replace("train", "Trn"),
            {},
            "has val, and no train; training images belong in {root}/train",
        ),
        ("val/a/1.png val/b/2.png", {}, "has val, and no train"),
        (
            "a/1.png a/2.png b/1.txt",
            {},
            "no images in the class folder {root}/b; left out: other files",
        ),
        (
            "a/1.png a/2.png b/1.png",
            {},
            "b/1.png is the only image of its class; two are needed to hold one out",
        ),
        ("", {}, "photos:v2 does not exist; name yours with --data.root"),
    ],
)
def test_a_folder_is_listed_as_it_is_laid_out_or_refused(
    files: str, links: dict[str, str], expected: list[str] | str, tmp_path: Path
) -> None:
    root = tmp_path / "photos:v2"  # a folder, though it looks like module:name
    laid_out(root, files.replace("b/1.txt", ""), links)
    if "b/1.txt" in files:
        (root / "b").mkdir()
        (root / "b/1.txt").touch()
    source = open_source(str(root))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected.format(root=root)) as caught:
            _ = source.table
        assert "\n" not in str(caught.value)
    else:
        assert source.class_names == expected
        paths = [path for samples in (source.train, source.val) for path, _ in samples]
        assert {label for samples in (source.train, source.val) for _, label in samples} == set(
            range(len(expected))
        )
        assert len(paths) == len(files.split()) + sum(link.endswith("png") for link in links)
        assert source.left_out.get("broken links", []) == [link for link in links if link == "gone"]


def test_a_folder_of_images_beside_a_configuration_is_no_run(tmp_path: Path) -> None:
    laid_out(tmp_path, "a/2024/camera/1.png a/2024/camera/2.png a/3.png b/1.png b/2.png b/3.png")
    (tmp_path / "a/2024/camera/config.yaml").touch()
    source = open_source(str(tmp_path))
    assert len(source.train) + len(source.val) == 6


def test_classes_that_are_linked_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    laid_out(tmp_path, "train/a/1.png train/b/1.png val/a/1.png", {"val/b": "../train/b"})
    assert open_source(str(tmp_path)).train
    assert "images that validate are trained on too" in capsys.readouterr().err


FLOATS = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(
    ("pixels", "suffix", "expected"),
    [
        (FLOATS, "tif", np.rint(255 * FLOATS)),
        *(
            ((65535 * FLOATS).astype(np.uint16), suffix, (65535 * FLOATS).astype(int) >> 8)
            for suffix in ("tif", "png")
        ),
        (255 * FLOATS, "tif", "reach from 0 to 255; 0 is read as black and 1 as white"),
        (FLOATS * np.nan, "tif", "reach from nan to nan"),
        ((255 * FLOATS).astype(np.int32), "tif", "signed or of 32 bits"),
    ],
)
def test_grey_of_more_than_eight_bits_is_scaled_or_refused(
    pixels: np.ndarray, suffix: str, expected: Any, tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(path := tmp_path / f"deep.{suffix}")
    if isinstance(expected, str):
        with pytest.raises(
            UserError, match=f"^cannot read the image {path}: .*{re.escape(expected)}"
        ):
            load_image(path)
    else:
        assert np.array_equal(np.asarray(load_image(path))[..., 1], expected)


@pytest.mark.parametrize("pixels", [(65535 * FLOATS).astype(np.uint16), FLOATS])
def test_tiff_files_whose_white_is_zero_are_turned(pixels: np.ndarray, tmp_path: Path) -> None:
    found = []
    for kind in ("minisblack", "miniswhite"):
        tifffile.imwrite(tmp_path / kind, pixels, photometric=kind)
        found.append(np.asarray(load_image(tmp_path / kind)))
    assert np.array_equal(found[1], 255 - found[0])


def test_pixels_that_pillow_reads_wrong_are_refused(tmp_path: Path) -> None:
    deep = (257 * np.arange(192, dtype=np.uint16)).reshape(3, 8, 8)
    how: Any = dict(photometric="rgb", planarconfig="separate")
    tifffile.imwrite(tmp_path / "good.tif", deep, compression="zlib", **how)
    assert np.array_equal(
        np.asarray(load_image(tmp_path / "good.tif")), np.moveaxis(deep >> 8, 0, -1)
    )
    tifffile.imwrite(tmp_path / "x.tif", deep, **how)
    with pytest.raises(UserError, match="lie one after the other"):
        load_image(tmp_path / "x.tif")
    color = np.stack([FLOATS] * 3, axis=-1)
    for pixels, words, settings in (
        (
            color,
            "not an image that Pillow reads: save it with 8 or 16 bits",
            dict(photometric="rgb"),
        ),
        (
            FLOATS.astype(np.float16),
            "not an image that Pillow reads: save it with 8 or 16 bits",
            {},
        ),
        ((127 * FLOATS).astype(np.int8), "which is white", {}),
        (FLOATS.round(), "compressed and big-endian", dict(byteorder=">", compression="zlib")),
    ):
        tifffile.imwrite(tmp_path / "y.tif", pixels, **settings)
        with pytest.raises(UserError, match=words):
            load_image(tmp_path / "y.tif")
    with pytest.raises(UserError, match="which is white"):
        load_image(Image.fromarray(np.zeros((8, 8), np.int32)))


def wide_png(width: int, height: int) -> bytes:
    """A PNG file whose header says this size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(bytes(99)))
    parts = (
        struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each))
        for each in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bomb(kind: str) -> bytes:
    """A picture of 64 pixels whose file claims far more work than that."""
    name, _, how = kind.partition(" ")
    file = BytesIO()
    Image.linear_gradient("L").resize((64, 64)).save(file, name, progressive=how == "scans")
    data = file.getvalue()
    if name == "JPEG":
        parts = {
            "padding": b"\xff" * 100_000,
            "comments": b"\xff\xfe\0\2" * 100_000,
            "junk": b"\xff\0" * 100_000,
        }
        last = data[data.rindex(b"\xff\xda") : -2]
        if how in ("scans", "padding at the end"):
            return data[:-2] + (last * 3_000 if how == "scans" else parts["padding"]) + data[-2:]
        return data[:2] + parts[how] + data[2:]
    if name == "PNG":
        start = data.index(b"IDAT") - 4
        tag, content = (
            (b"teSt", b"")
            if how == "chunks"
            else (b"IDAT", b"")
            if how == "data"
            else (b"teSt", bytes(2**21))
        )
        chunk = (
            struct.pack(">I", len(content))
            + tag
            + content
            + struct.pack(">I", zlib.crc32(tag + content))
        )
        return data[:start] + chunk * (1 if content else 10_000) + data[start:]
    if name == "GIF":
        start = data.index(b",\0\0\0\0")
        return data[:start] + b"!\xfe" + (b"\xff" + bytes(255)) * 20_000 + b"\0" + data[start:]
    return data + bytes(2**21)  # WebP


BOMBS = ["JPEG scans", "JPEG padding", "JPEG padding at the end", "JPEG comments", "JPEG junk"]
BOMBS += ["PNG chunks", "PNG data", "PNG a chunk", "GIF comment", "WEBP bytes"]


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_picture_may_not_take_much(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever reads it: the facts of the file are counted before, and while, it is decoded."""
    monkeypatch.setattr(reading, "OPENING", (10_000, 2**20))
    monkeypatch.setattr(reading, "DECODING", (10_000, 2**16))
    (path := tmp_path / "x.jpg").write_bytes(bomb(kind))
    training = ImageNetDataModule(root=str(tmp_path)).pipeline  # an extra, which may be gone
    for read in (load_image, *([lambda raw: training.open(raw, "x", True)] if training else [])):
        with pytest.raises(
            UserError,
            match=r"cannot read the image .*(scans are more than|far more parts or bytes)",
        ):
            read(path)


def test_a_picture_may_take_the_last_byte_that_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "OPENING", (10, 20))
    assert reading.Bounded(BytesIO(bytes(20))).read() == bytes(20)
    with pytest.raises(ValueError, match="far more parts or bytes"):
        reading.Bounded(BytesIO(bytes(21))).read()


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda path: path.write_text("buy milk"), "not an image"),
        (lambda path: path.touch(), "not an image; it is empty"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
            "a pointer of Git LFS",
        ),
        (lambda path: path.write_text("<!DOCTYPE html>"), "a page of HTML"),
        (lambda path: Image.new("RGB", (16, 16)).save(path, "EPS"), "not an image"),
        (
            lambda path: path.write_bytes(wide_png(2_000_000, 1)),
            "one side of its 2,000,000 × 1 pixels is over 1,000",
        ),
        (
            lambda path: path.write_bytes(wide_png(20_000, 20_000)),
            "exceeds limit of 178956970 pixels",
        ),
        (
            lambda path: path.touch() or os.truncate(path, 300 * 2**30),
            "more than the 1,073,741,824 that are read",
        ),
    ],
)
def test_what_is_no_picture_or_too_large_is_refused_by_name(
    put: Any, words: str, tmp_path: Path
) -> None:
    put(path := tmp_path / "x.png")
    with pytest.raises(UserError, match=f"^cannot read the image {path}: .*{words}"):
        load_image(path)


def pictures_as_people_have_them(
    photographs: list[Image.Image], root: Path, prepared: bool
) -> None:
    """A turned JPEG file, a clip art with hidden colors and a gray file in each class; or what people see in them."""
    photo = photographs[0].resize((72, 48))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    file = BytesIO()
    photo.save(file, "JPEG", exif=turned)
    art = photo.convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(photo.size))
    seen = {
        "a": ImageOps.exif_transpose(Image.open(file)),
        "b": Image.alpha_composite(Image.new("RGBA", art.size, (255, 255, 255, 255)), art).convert(
            "RGB"
        ),
        "c": photo.convert("LA").convert("RGB"),
    }
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        folder = root / place
        folder.mkdir(parents=True)
        if prepared:
            for name, image in seen.items():
                image.save(folder / f"{name}.png")
        else:
            (folder / "a.jpg").write_bytes(file.getvalue())
            art.save(folder / "b.png")
            photo.convert("LA").save(folder / "c.png")


class OwnTransform(ImageNetDataModule):
    def make_train_transform(self) -> Any:
        return self.settings.transform()


@pytest.mark.parametrize("backend", ["auto", "timm", "own"])
def test_every_path_sees_what_people_see(
    photographs: list[Image.Image], tmp_path: Path, backend: str
) -> None:
    found: list[list[Tensor]] = []
    for prepared in (False, True):
        root = tmp_path / str(prepared)
        pictures_as_people_have_them(photographs, root, prepared)
        kind, reads = (OwnTransform, "auto") if backend == "own" else (ImageNetDataModule, backend)
        settings = dict(
            img_size=32, batch_size=6, num_workers=0, backend=reads, repeats=1, mixup=0, cutmix=0
        )
        data = kind(str(root), **settings)
        data.setup("fit")
        loaders = data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()
        found.append([next(iter(loader))[0] for loader in loaders])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
    as_published = ImageNetDataModule(
        str(tmp_path / "False"), exif_orientation=False, background=None, **settings
    )
    as_published.setup("fit")
    assert not torch.equal(next(iter(as_published.val_dataloader()))[0], found[1][1])


BREAKS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-200]),  # its header is whole
    "zeros": lambda path: path.write_bytes(bytes(3000)),
    "a web page": lambda path: path.write_text("<html>404 Not Found</html>"),
    "a cut PNG": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00"),
    "vanished": lambda path: (path.unlink(), path.symlink_to("/nowhere/gone.jpg")),
}


class OneWay(BytesIO):
    """A stream that cannot go back, as an answer over HTTP."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise UnsupportedOperation("seek")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_stream_that_cannot_go_back_is_read_once(
    kind: str, photographs: list[Image.Image]
) -> None:
    photographs[0].resize((60, 40)).save(file := BytesIO(), kind)
    expected = np.asarray(load_image(BytesIO(file.getvalue())))
    assert np.array_equal(np.asarray(load_image(OneWay(file.getvalue()))), expected)


def test_the_list_of_unreadable_images_takes_any_name(tmp_path: Path) -> None:
    names = [os.fsdecode(b"a\xff.jpg"), 'b, "c"\n.jpg', "ö.jpg"]
    for name in names:
        UnreadableImages(tmp_path / "list.csv").note(name, "cut off")
    assert UnreadableImages(tmp_path / "list.csv").read() == dict.fromkeys(names, "cut off")


def test_the_list_of_unreadable_images_begins_anew_when_a_run_goes_on(mixed_root: Path) -> None:
    data, path = images_in(mixed_root), mixed_root / "unreadable.csv"
    data.unreadable_path = path
    UnreadableImages(path).note("whole again.jpg", "cut off")
    report, short = UnreadableReport(data), dict(limit_train_batches=1, limit_val_batches=0)
    fit = trainer(max_epochs=1, callbacks=[report], **short)
    fit.fit(module(img_size=32, num_classes=3), datamodule=data)
    assert not path.exists()


@pytest.mark.parametrize("backend", ["auto", "timm"])
def test_damaged_images_are_replaced_listed_and_end_the_run_if_they_are_many(
    mixed_root: Path, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def batches(**settings: Any) -> tuple[ImageNetDataModule, list[tuple[list, Tensor]]]:
        common: dict = dict(img_size=16, batch_size=2, num_workers=0, repeats=1, backend=backend)
        data = ImageNetDataModule(root=str(mixed_root), **common | settings)
        data.unreadable_path = mixed_root / "unreadable.csv"
        data.setup("fit")
        train = data.train_dataloader()
        return data, [
            (keys, images) for keys, (images, _) in zip(train.batch_sampler, train, strict=True)
        ]

    _, before = batches()
    paths = [path for path, _ in open_source(str(mixed_root)).train]
    broken = dict(zip(range(0, len(paths), 6), BREAKS, strict=True))
    for place, kind in broken.items():
        BREAKS[kind](Path(paths[place]))
    data, after = batches(max_bad_share=0.2)
    for (keys, whole), (same_keys, images) in zip(before, after, strict=True):
        assert keys == same_keys
        for key, one, other in zip(keys, whole, images, strict=True):
            assert torch.equal(one, other) is (key[1] not in broken)
    assert {*data.unreadable.read()} == {paths[place] for place in broken}
    assert data.unreadable.check() == len(BREAKS)
    assert "; the run goes on without it, and" in capfd.readouterr().err
    _, again = batches(max_bad_share=0.2)
    # by the same others
    assert all(torch.equal(one[1], other[1]) for one, other in zip(after, again, strict=True))
    with pytest.raises(
        UserError, match=r"2 images cannot be read, 1 are allowed: .*give a larger --data.max"
    ):
        batches(max_bad_share=0.02)
