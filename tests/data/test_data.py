"""The embedded digits, image folders good and bad, and Mixup and CutMix against timm's."""

import csv
import gc
import hashlib
import os
import re
import shutil
import socket
import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import REPO, SMALL
from lightning.pytorch import LightningModule, Trainer
from PIL import ExifTags, Image, ImageOps
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from cait import plugins, seeds
from cait.cli import main
from cait.data.datamodule import ImageNetDataModule
from cait.data.digits import write_digits
from cait.data.folder import copies
from cait.data.listing import TORCHVISIONS, Files
from cait.data.loader import Loading
from cait.data.reading import UnreadableImages, check_headers, load_rgb
from cait.data.source import open_source
from cait.errors import UserError


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
    shares = [sum(seen[n] == "val" for n in np.flatnonzero(digits.target == label)) for label in range(10)]
    assert sum(shares) == 360
    assert min(shares) >= 35  # stratified
    assert max(shares) <= 37


def test_digits_are_written_once_and_the_split_is_fixed(tmp_path: Path, digits_root: Path) -> None:
    write_digits(tmp_path / "again")
    names = {path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.png")}
    assert names == {path.relative_to(digits_root) for path in digits_root.rglob("*.png")}
    one = tmp_path / "again/train/0"
    before = one.stat().st_mtime_ns
    write_digits(tmp_path / "again")
    assert one.stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]


def test_an_empty_folder_is_filled_and_two_runs_may_write_at_once(tmp_path: Path, digits_root: Path) -> None:
    (tmp_path / "digits").mkdir()
    # The other run's folder arrives after this one has looked and before it puts its own in place.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "chmod", lambda *_: shutil.copytree(digits_root, tmp_path / "digits", dirs_exist_ok=True))
        write_digits(tmp_path / "digits")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits"]
    shutil.rmtree(tmp_path / "digits")
    (tmp_path / "digits").mkdir()
    write_digits(tmp_path / "digits")
    assert len(list((tmp_path / "digits").rglob("*.png"))) == 1797
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits"]


def module(root: Path, **settings: object) -> ImageNetDataModule:
    defaults: dict = dict(img_size=32, batch_size=4, num_workers=0, eval_batch_size=4)
    return ImageNetDataModule(root=str(root), **(defaults | settings))


@pytest.mark.filterwarnings("error")
def test_images_of_every_mode_go_through_the_whole_recipe(mixed_root: Path) -> None:
    data = module(mixed_root, repeats=1)
    data.setup("fit")
    assert data.class_names == ["cat", "dog", "owl"]
    images = torch.cat([images for images, _ in data.train_dataloader()])
    assert images.shape == (36, 3, 32, 32)
    assert images.isfinite().all()
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5


def test_evaluation_is_resize_centre_crop_normalise(mixed_root: Path) -> None:
    data = module(mixed_root, img_size=48, crop_pct=0.75)
    data.setup("validate")
    path, _ = data.val_images.samples[0]
    image = load_rgb(path)
    scale = 64 / min(image.size)
    size = [64 if side == min(image.size) else int(side * scale) for side in image.size]
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = round((size[0] - 48) / 2), round((size[1] - 48) / 2)
    pixels = np.asarray(image.crop((left, top, left + 48, top + 48)), dtype=np.float32) / 255
    expected = (pixels - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    got = data.normalize_and_erase(data.val_images[0][0][None])[0].permute(1, 2, 0).numpy()
    assert np.abs(got - expected).max() < 1e-5


def test_a_folder_of_class_folders_alone_is_divided(mixed_root: Path) -> None:
    root = mixed_root / "train"
    data = module(root, val_fraction=0.25)
    data.setup("fit")
    train, val = data.train_images.samples, data.val_images.samples
    assert (len(train), len(val)) == (27, 9)
    assert not {path for path, _ in train} & {path for path, _ in val}
    assert [sum(label == c for _, label in val) for c in range(3)] == [3, 3, 3]
    again = open_source(str(root), val_fraction=0.25)
    assert [list(again.train), list(again.val)] == [list(train), list(val)]


def broken(mixed_root: Path, kind: str) -> Path:
    if kind == "missing root":
        return mixed_root / "nowhere"
    if kind == "missing val":
        (mixed_root / "val").rename(mixed_root / "kept")
    elif kind == "empty class":
        (mixed_root / "train" / "emu").mkdir()
        (mixed_root / "val" / "emu").mkdir()
    elif kind == "other classes":
        (mixed_root / "val" / "owl").rename(mixed_root / "val" / "owls")
    elif kind == "one class":
        for name in ("cat", "dog"):
            (mixed_root / "train" / name).rename(mixed_root / name)
    elif kind == "text named jpg":
        (mixed_root / "train" / "cat" / "note.jpg").write_text("buy milk")
    elif kind == "empty file":
        (mixed_root / "val" / "dog" / "zero.png").touch()
    return mixed_root


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing root", "nowhere does not exist"),
        ("missing val", "val does not exist"),
        ("empty class", "no images in the class folder"),
        ("other classes", "same class folders: owl, owls"),
        ("one class", "at least 2 are needed"),
        ("text named jpg", "note.jpg: not an image"),
        ("empty file", "zero.png"),
    ],
)
def test_unusable_folders_are_told_in_one_line(mixed_root: Path, kind: str, words: str) -> None:
    data = module(broken(mixed_root, kind), max_bad_share=0)
    with pytest.raises(UserError) as caught:
        data.setup("fit")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_image_is_told(mixed_root: Path, photographs: list[Image.Image]) -> None:
    path = mixed_root / "train" / "cat" / "cut.jpg"
    photographs[0].save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"cut\.jpg"):
        load_rgb(str(path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(batch_size=5), "even"),
        (dict(batch_size=0), "at least 1"),
        (dict(num_workers=-1), "num_workers"),
        (dict(auto_augment="rond-m9"), "auto_augment"),
        (dict(auto_augment="rand-Posterise-m9"), "there is no section 'Posterise'"),
        (dict(auto_augment="augmix-m"), "there is no section 'm'"),
        (dict(cache_gb=-1), "cache_gb must be above 0"),
        (dict(crop_pct=0), "crop_pct"),
        (dict(mixup=-1), "mixup"),
        (dict(hflip=2), "hflip"),
        (dict(val_fraction=1), "val_fraction"),
        (dict(mean=[0.5]), "mean and std take three"),
        (dict(std=[0.5, 0.5]), "mean and std take three"),
        (dict(std=[0.5, 0.5, 0]), "std above 0"),
        (dict(interpolation="cubic"), "interpolation must be one of nearest, .*got 'cubic'"),
        (dict(interpolation="random"), "interpolation must be one of"),
    ],
)
def test_bad_settings_are_told(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        module(tmp_path, **settings)


def test_too_few_images_for_a_batch_are_told(mixed_root: Path) -> None:
    data = module(mixed_root, batch_size=64, repeats=1)
    data.setup("fit")
    with pytest.raises(UserError, match="lower --data"):
        data.train_dataloader()


def test_too_few_images_for_the_processes_are_told(mixed_root: Path) -> None:
    data = module(mixed_root, predict_root=str(mixed_root / "val" / "cat"))
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=16, num_devices=16)
    with pytest.raises(UserError, match="15 validation images cannot be shared out over 16 processes"):
        data.val_dataloader()
    data.setup("predict")
    with pytest.raises(UserError, match="5 prediction images cannot be shared out over 16 processes"):
        data.predict_dataloader()
    data.trainer.world_size = 5
    assert len(data.predict_dataloader()) == 1


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_and_smoothing_are_timms(mixed_root: Path, mode: str) -> None:
    data = module(mixed_root, mix_mode=mode, seed=5)
    data.setup("fit")
    data.trainer = Trainer(logger=False, enable_checkpointing=False, barebones=False, enable_progress_bar=False)
    data.trainer.training = True
    theirs = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, switch_prob=0.5, mode=mode, label_smoothing=0.1, num_classes=3)
    used = set()
    for step in range(12):
        data.trainer.fit_loop.epoch_loop.batch_progress.current.ready = step
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4,))
        np.random.seed(seeds.batch_mixing(5, 0, step, 0))
        expected_images, expected_targets = theirs(images.clone(), labels)
        got_images, got_targets = data.on_after_batch_transfer((images.clone(), labels), 0)
        assert torch.equal(got_images, expected_images)
        assert torch.allclose(0.9 * got_targets + 0.1 / 3, expected_targets, rtol=0, atol=1e-6)  # effective
        used.add("cutmix" if torch.isin(got_images[0], torch.cat([images[0], images[3]])).all() else "mixup")
        logits = torch.randn(4, 3)
        ours = torch.nn.functional.cross_entropy(logits, got_targets, label_smoothing=0.1)
        assert ours.item() == pytest.approx(SoftTargetCrossEntropy()(logits, expected_targets).item(), rel=1e-6)
    assert used == {"cutmix", "mixup"}


def test_evaluation_batches_are_not_mixed(mixed_root: Path) -> None:
    data = module(mixed_root)
    data.setup("fit")
    data.trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    data.trainer.validating = True
    batch = (torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0]))
    assert all(given is got for given, got in zip(batch, data.on_after_batch_transfer(batch, 0), strict=True))


def test_predictions_cover_a_folder(
    mixed_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(mixed_root.parent)
    monkeypatch.setattr(sys, "argv", ["cait"])
    small = [*SMALL, f"--data.root={mixed_root}", "--data.batch_size=4", "--data.num_workers=0"]
    main(["fit", *small, "--trainer.max_steps=2", "--run_name=mixed"])
    images = mixed_root.parent / "images"
    (mixed_root / "val").rename(images)
    (images / "folder.jpg").mkdir()
    mixed_root.rename(mixed_root.parent / "gone")  # the checkpoint knows the classes
    arguments = ["predict", "mixed", str(images), "--format=csv", "--top_k=1", "--output=predictions.csv"]
    main(arguments)
    table = mixed_root.parent / "predictions.csv"
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]) for row in rows] == sorted(p for p in images.rglob("*.*") if p.is_file())
    assert {row["class"] for row in rows} <= {"cat", "dog", "owl"}
    assert all(1 / 3 < float(row["probability"]) <= 1 for row in rows)
    before = table.read_bytes()
    with pytest.raises(SystemExit):
        main(arguments)
    assert "predictions.csv exists; move it away or name another file with --output" in capsys.readouterr().err
    assert table.read_bytes() == before


def test_a_checkpoint_of_other_classes_is_refused(mixed_root: Path) -> None:
    data = module(mixed_root)
    data.setup("fit")
    state = data.state_dict()
    data.load_state_dict(state)
    (mixed_root / "train" / "owl").rename(mixed_root / "train" / "own")
    with pytest.raises(UserError, match=r"checkpoint's 3 classes are not the 3 of .*: owl, own"):
        module(mixed_root).load_state_dict(state)


def test_classes_are_listed_once(mixed_root: Path) -> None:
    data = module(mixed_root)
    assert data.num_classes == 3  # the model's head is made
    for added in (lambda: (mixed_root / "train" / "bat").mkdir(), lambda: (mixed_root / "train" / "emu").mkdir()):
        added()
        data.setup("fit")
        assert data.state_dict()["class_names"] == data.class_names == ["cat", "dog", "owl"]
        assert {label for _, label in data.train_images.samples} == {0, 1, 2}
        assert len(data.train_images) == 36


def test_the_digest_is_of_the_names_in_order(digits_root: Path) -> None:
    data = module(digits_root)
    data.setup("fit")
    names = "".join(f"{path.relative_to(digits_root)}\n" for path in sorted(digits_root.glob("train/*/*")))
    expected = hashlib.sha256(names.encode()).hexdigest()[:16]
    assert data.state_dict()["depends_on"]["digest of the training pictures' names"] == expected


def test_files_are_what_was_listed() -> None:
    listed = [("a/b.png", 3), ("", -1), ("ä/ü 0.jpg", 70_000), ("not \udcff utf8.png", 0)]
    files = Files(listed)
    assert len(files) == 4
    assert list(files) == [files[index] for index in range(4)] == listed
    assert [files.name(index) for index in range(4)] == [name for name, _ in listed]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="the system does not tell a worker's memory")
def test_a_worker_does_not_copy_the_list_of_files() -> None:
    def own() -> int:
        """Bytes that this process shares with no other."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))

    files = Files((f"data/train/n{number // 300:08d}/n{number:08d}.JPEG", number // 300) for number in range(300_000))
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        gc.disable()
        before = own()
        for index in range(len(files)):
            files.name(index), files[index]
        os.write(writer, str(own() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 100)) < 8_000_000  # as a list of tuples 60 million


class Recorder(LightningModule):
    """Notes the batches that it is trained and validated on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"train": [], "val": []}

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen["train"].append(batch)
        return self.weight.sum()

    def validation_step(self, batch: Any) -> None:
        self.seen["val"].append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize("overfit_batches", [2, 0.25, 0.0])
@pytest.mark.parametrize("mix_mode", ["batch", "elem"])
def test_overfitting_sees_the_same_batches_each_epoch(
    mixed_root: Path, overfit_batches: float, mix_mode: str, recwarn: pytest.WarningsRecorder
) -> None:
    recorder = Recorder()
    settings: dict = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    settings |= dict(overfit_batches=overfit_batches, num_sanity_val_steps=0, enable_model_summary=False)
    settings |= {} if overfit_batches else dict(limit_train_batches=2, limit_val_batches=2)
    Trainer(max_epochs=3, **settings).fit(recorder, datamodule=module(mixed_root, mix_mode=mix_mode))
    assert not [str(warning.message) for warning in recwarn if "shuffling" in str(warning.message)]
    for part, seen in recorder.seen.items():
        epochs = [seen[place :: len(seen) // 3] for place in range(len(seen) // 3)]
        assert all(len(batches) == 3 for batches in epochs)
        for first, *others in epochs:
            same = [all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others]
            assert same == ([True, True] if overfit_batches or part == "val" else [False, False])
    assert not torch.equal(recorder.seen["train"][0][0], recorder.seen["train"][1][0])


def test_the_embedded_data_set_appears_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/digits").mkdir(parents=True)
    data = ImageNetDataModule(root="data/digits", img_size=16, batch_size=32, num_workers=0)
    assert data.num_classes == 10  # known before it is written, because the model is built first
    data.setup("fit")
    assert data.num_classes == len(list(Path("data/digits/train").iterdir())) == 10
    assert len(data.train_images) == 1437
    with pytest.raises(UserError, match="does not exist"):
        ImageNetDataModule(root="data/digit").setup("fit")


def test_sixteen_bits_of_grey_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    pixels = np.asarray(load_rgb(str(tmp_path / "deep.png")))
    assert np.array_equal(pixels, np.repeat((ramp >> 8)[..., None], 3, axis=2))


FLOATS = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize(
    ("pixels", "suffix", "expected"),
    [
        (FLOATS, "tif", np.rint(255 * FLOATS)),
        ((65535 * FLOATS).astype(np.uint16), "tif", (65535 * FLOATS).astype(int) >> 8),
        ((65535 * FLOATS).astype(np.uint16), "pgm", (65535 * FLOATS).astype(int) >> 8),
        (255 * FLOATS, "tif", "reach from 0 to 255; 0 is read as black and 1 as white"),
        (FLOATS - 0.5, "tif", "reach from -0.5 to 0.5"),
        (FLOATS * np.nan, "tif", "reach from nan to nan"),
        ((255 * FLOATS).astype(np.int32), "tif", "signed or of 32 bits"),
        ((1e6 * FLOATS).astype(np.int32), "", "reach from 0 to 1e+06; 0 is read as black and 65,535 as white"),
    ],
)
def test_a_range_that_eight_bits_do_not_hold_is_scaled_or_refused(
    pixels: np.ndarray, suffix: str, expected: Any, tmp_path: Path
) -> None:
    image: Any = Image.fromarray(pixels)
    if suffix:
        image.save(image := tmp_path / f"deep.{suffix}")
    if isinstance(expected, str):
        with pytest.raises(
            UserError, match=f"^cannot read the image {image if suffix else 'it'}: .*{re.escape(expected)}"
        ):
            load_rgb(image, "it")
    else:
        assert np.array_equal(np.asarray(load_rgb(image))[..., 1], expected)


def made(kind: str, path: Path) -> None:
    """Put something that is no picture, or none that anyone takes in, under the name of one."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind.startswith("/dev"):
        path.symlink_to(kind)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(300 * 2**30)
    elif kind in ("TGA", "ICO", "JPEG2000", "EPS"):
        Image.new("RGB", (16, 16)).save(path, kind)
    else:
        width, height = map(int, kind.split("x"))
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
        chunks = (header, b"IDAT" + zlib.compress(bytes(99)))
        parts = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, "it is not a regular file") for kind in ("pipe", "folder", "/dev/zero", "/dev/full")),
        ("socket", "No such device"),
        ("sparse", "it has 322,122,547,200 bytes, more than the 1,073,741,824 that are read"),
        *((kind, "not an image") for kind in ("TGA", "ICO", "JPEG2000", "EPS")),
        ("2000000x1", "one side of its 2,000,000 × 1 pixels is over 1,000 times the other"),
        ("1x170000000", "one side of its 1 × 170,000,000 pixels"),
        ("20000x20000", "exceeds limit of 178956970 pixels"),
    ],
)
def test_what_is_no_picture_and_one_beyond_measure_are_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    made(kind, tmp_path / "x.png")
    unreadable = UnreadableImages(None, 1)
    check_headers([(str(tmp_path / "x.png"), 0)], unreadable)
    assert unreadable.seen == {str(tmp_path / "x.png")}
    with pytest.raises(UserError) as caught:
        load_rgb(tmp_path / "x.png")
    assert str(caught.value).startswith(f"cannot read the image {tmp_path / 'x.png'}: ")
    assert words in str(caught.value)


def test_one_place_opens_pictures() -> None:
    found = [path.name for path in REPO.glob("src/**/*.py") if re.search(r"Image\.open\((?!\")", path.read_text())]
    assert [name for name in found if not name.startswith("test_")] == ["reading.py"]


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
    ("links", "expected"),
    [
        ({"a/again": "."}, 6),
        ({"a/again": ".", "a/once_more": ".", "a/x/y": "../../a"}, 6),
        ({"a/z": "../../store", "a/y": "../../store"}, 7),
        ({"a/4.png": "1.png", "a/5.png": "4.png"}, 6),
        ({"c": "../store", "a/gone": "nowhere", "gone_too": "nowhere"}, 8),
        ({"b/4.png": "nowhere", "b/5.png": "5.png"}, 8),  # images that cannot be read
        ({"a/up": ".."}, "{root}/a/up/b and {root}/b are one folder, under two classes"),
        ({"a/x": "../../store", "b/y": "../../store"}, "{root}/a/x and {root}/b/y are one folder, under two classes"),
        ({"c": "b"}, "{root}/b and {root}/c are one folder, under two classes"),
        ({"b/0.png": "../a/1.png"}, "{root}/a/1.png and {root}/b/0.png are one file, under two classes"),
    ],
)
def test_each_file_is_listed_once_whatever_leads_to_it(
    links: dict[str, str], expected: int | str, tmp_path: Path
) -> None:
    laid_out(tmp_path / "store", "9.png 8.png" if "c" in links else "9.png")
    laid_out(root := tmp_path / "root", TWO_CLASSES, links)
    source = open_source(str(root))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected.format(root=root)):
            _ = source.sets
        return
    paths = [path for samples in source.sets for path, _ in samples]
    assert len(paths) == len(set(map(os.path.realpath, paths))) == expected
    assert not any(f"{root}/{link}/" in path for path in paths for link in ("a/again", "a/once_more", "a/x"))
    assert source.left_out.get("broken links", []) == [link for link in links if "gone" in link]


@pytest.mark.parametrize(
    ("files", "links", "expected"),
    [
        ("Bus/1.png Bus/2.png Train/1.png Train/2.png", {}, ["Bus", "Train"]),
        ("bus/1.png bus/2.png Training/1.png Training/2.png", {}, ["Training", "bus"]),
        ("Bus/1.png Bus/2.png Train/1.png Train/2.png Test/1.png Test/2.png", {}, ["Bus", "Test", "Train"]),
        ("Validation/1.png Validation/2.png Test/1.png Test/2.png", {}, ["Test", "Validation"]),
        (TWO_FOLDERS.replace("train", "Train").replace("val", "TEST"), {}, ["a", "b"]),
        ("train/1.png val/a/1.png val/b/1.png", {}, "train holds 0 class folder"),
        ("Train/1.png Train/2.png Test/1.png Test/2.png", {}, "Train holds 0 class folder"),
        ("train/a/1.png train/b/1.png val/1.png", {}, "do not hold the same class folders: a, b"),
        ("train/a/1.png train/b/1.png", {"val/a": "../train/b", "val/b": "../train/a"}, "one folder, under two"),
        ("train/cr\u00e8me/1.png train/b/1.png val/cre\u0300me/2.png val/b/1.png", {}, ["b", "cr\u00e8me"]),
        ("cr\u00e8me/1.png cr\u00e8me/2.png cre\u0300me/1.png b/1.png", {}, "two folders called cr.*me"),
        ("a/1.png a/2.png K\udce4se/1.png K\udce4se/2.png", {}, "the class folder .*K�se is not UTF-8: rename it"),
    ],
)
def test_a_layout_is_one_only_if_what_lies_in_it_fits(
    files: str, links: dict[str, str], expected: list[str] | str, tmp_path: Path
) -> None:
    laid_out(tmp_path / "photos:v2", files, links)
    source = open_source(str(tmp_path / "photos:v2"))  # a folder, though it looks like module:name
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            _ = source.sets
    else:
        assert source.class_names == expected
        assert {label for samples in source.sets for _, label in samples} == set(range(len(expected)))


def test_a_folder_that_exists_comes_before_code_and_sets_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos:v2", "torch/cifar10"):
        laid_out(Path(name), TWO_CLASSES)
        assert len(open_source(name).train) == 4


def test_what_cannot_be_listed_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out(tmp_path, TWO_CLASSES)
    theirs = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return theirs(path)

    monkeypatch.setattr(os, "scandir", scandir)  # for the superuser, who may list everything
    with pytest.raises(UserError, match=f"^cannot list the folder {tmp_path}/b: Permission denied$"):
        _ = open_source(str(tmp_path)).sets


def test_images_that_are_there_twice_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    laid_out(tmp_path, TWO_FOLDERS)
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "val/b/same.png")
    shutil.copy(tmp_path / "train/b/1.png", tmp_path / "val/b/again.png")
    (tmp_path / "train/a/.hidden.png").touch()
    data = module(tmp_path)
    data.setup("fit")
    one, two = copies(*data.source.sets)
    places = f"{tmp_path}/train/a/1.png = {tmp_path}/val/b/same.png"
    assert one == f"1 images are there twice, under two labels: {places}"
    assert two.startswith("1 images are there twice, to train on and to validate on: ")
    assert data.summary().endswith("2 classes; left out: hidden (1): train/a/.hidden.png")


def pictures_as_people_have_them(photographs: list[Image.Image], root: Path, prepared: bool) -> None:
    """A turned JPEG file, a clip art with hidden colours and a grey file in each class; or what people see in them."""
    photo = photographs[0].resize((72, 48))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    file = BytesIO()
    photo.save(file, "JPEG", exif=turned)
    art = photo.convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(photo.size))
    seen = {
        "a": ImageOps.exif_transpose(Image.open(file)),
        "b": Image.alpha_composite(Image.new("RGBA", art.size, (255, 255, 255, 255)), art).convert("RGB"),
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


def readable(backend: Any) -> None:
    """Skip the test where this backend does not work."""
    try:
        _ = ImageNetDataModule(backend=backend).pipeline
    except UserError as error:
        pytest.skip(str(error))


class OwnTransform(ImageNetDataModule):
    def make_train_transform(self) -> Any:
        return self.preprocessing.transform()


@pytest.mark.parametrize("backend", ["nvimgcodec", "torchvision", "pillow", "timm", "own"])
def test_every_path_sees_what_people_see(photographs: list[Image.Image], tmp_path: Path, backend: str) -> None:
    if backend != "own":
        readable(backend)
    found: list[list[Tensor]] = []
    for prepared in (False, True):
        root = tmp_path / str(prepared)
        pictures_as_people_have_them(photographs, root, prepared)
        kind, reads = (OwnTransform, "auto") if backend == "own" else (ImageNetDataModule, backend)
        settings = dict(img_size=32, batch_size=6, num_workers=0, backend=reads, repeats=1, mixup=0, cutmix=0)
        data = kind(str(root), predict_root=str(root / "val"), **settings)
        data.setup("fit")
        batches = [next(iter(data.train_dataloader()))[0], next(iter(data.val_dataloader()))[0]]
        data.setup("predict")
        found.append([*batches, next(iter(data.predict_dataloader()))[0]])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
    as_published = ImageNetDataModule(str(tmp_path / "False"), exif_orientation=False, background=None, **settings)
    as_published.setup("fit")
    assert not torch.equal(next(iter(as_published.val_dataloader()))[0], found[1][1])


@pytest.mark.parametrize(("suffix", "backend", "words"), [
    ("png", "pillow", "Pillow decodes"),
    ("png", "torchvision", "Pillow decodes"),
    ("jpg", "torchvision", "torchvision decodes JPEG files"),
    ("png", "timm", "timm's own transform"),
])  # fmt: skip
def test_what_reads_the_images_is_told_of_those_that_are_there(
    tmp_path: Path, suffix: str, backend: str, words: str
) -> None:
    readable(backend)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("L", (8, 8)).save(tmp_path / name / f"{number}.{suffix}")
    data = ImageNetDataModule(str(tmp_path), backend=backend)  # type: ignore[arg-type]
    assert data.how_read().startswith(words)


def test_without_an_extra_for_it_timm_reads_the_images(
    mixed_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data, state = module(mixed_root, num_workers=1), module(mixed_root, backend="timm").state_dict()
    state["depends_on"]["pixels by"] = "another"
    monkeypatch.setattr(plugins, "extras", dict)
    data.setup("fit")
    theirs = module(mixed_root, backend="timm")
    theirs.setup("fit")
    assert torch.equal(next(iter(data.train_dataloader()))[0], next(iter(theirs.train_dataloader()))[0])
    assert data.how_read() == "timm's own transform"
    for one in (data, theirs):
        one.trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        one.trainer.training = True
    data.load_state_dict(state)
    assert "the run's pixels were by another, an extra that is gone; timm's are nearly the same" in caplog.text
    with pytest.raises(UserError, match="pixels by was another, is timm"):
        theirs.load_state_dict(state)
    with pytest.raises(UserError, match="backend pillow needs an extra that is not here; auto takes timm's transform"):
        module(mixed_root, backend="pillow").setup("fit")


def test_files_are_told_by_torchvisions_suffixes() -> None:
    assert TORCHVISIONS == IMG_EXTENSIONS


def test_one_damaged_image_of_a_small_folder_does_not_end_the_run(
    mixed_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = sorted(mixed_root.glob("train/*/*.jpg"))[0]
    path.write_bytes(path.read_bytes()[:-200])  # its header is whole
    settings = dict(root=str(mixed_root), img_size=16, batch_size=2, num_workers=0, repeats=1)
    data = ImageNetDataModule(**settings)
    data.unreadable_path = mixed_root / "unreadable.csv"
    data.setup("fit")
    assert sum(len(labels) for _, labels in data.train_dataloader()) == len(data.train_images)
    assert list(data.unreadable.read()) == [str(path)]
    assert data.unreadable.check() == 1
    assert f"cannot read the image {path}" in capfd.readouterr().err
    with pytest.raises(UserError, match="2 images cannot be read, 1 are allowed"):
        data.unreadable.note("another", "cannot read it")
    strict = ImageNetDataModule(**settings, max_bad_share=0)
    strict.setup("fit")
    with pytest.raises(UserError, match="1 images cannot be read, 0 are allowed") as refused:
        list(strict.train_dataloader())
    share = float(str(refused.value).rpartition("--data.max_bad_share ")[2])
    lenient = ImageNetDataModule(**settings, max_bad_share=share)
    lenient.setup("fit")
    assert sum(len(labels) for _, labels in lenient.train_dataloader()) == len(lenient.train_images)


@pytest.mark.parametrize(
    ("bad", "images", "share"),
    [(2, 174, 0.03), (8, 713, 0.03), (1, 1_281_167, 0.01), (29, 100, 0.58), (5, 11, 0.91), (6, 11, None)],
)
def test_a_run_that_too_many_images_end_names_a_share_that_suffices(bad: int, images: int, share: float | None) -> None:
    unreadable = UnreadableImages(None, bad - 1, images)
    for number in range(bad - 1):
        unreadable.note(str(number), "cannot read it")
    with pytest.raises(UserError) as refused:
        unreadable.note("the last", "cannot read it")
    _, named, value = str(refused.value).partition("; to go on without them give --data.max_bad_share ")
    assert (float(value) if named else None) == share
    assert share is None or Loading(max_bad_share=share).bad_allowed(images) >= bad
