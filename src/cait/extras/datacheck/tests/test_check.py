"""`cait check`: what it counts, and the mistakes that it is for."""

import csv
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from harness import call
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from cait.cli import main
from cait.data.source import open_source
from cait.extras.frames import told_of_frames


def check(root: Path, *options: str) -> CompletedProcess[str]:
    return call(root, "check", str(root), *options)


def test_a_folder_without_fault(mixed_root: Path) -> None:
    for name in ("train/cat/.thumbnails", "train/__MACOSX", "val/.trash"):  # which a run leaves out
        (mixed_root / name).mkdir()
        shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / name / "0.jpg")
    done = check(mixed_root)
    assert done.returncode == 0
    assert done.stdout.startswith(
        "3 classes, 36 training and 15 validation images\ndecoded 51 images"
    )
    # Class folders alone.
    assert "decoded 7 images" in check(mixed_root / "train", "--images", "7").stdout


def test_copies_of_an_image_are_named(mixed_root: Path) -> None:
    shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / "train/dog/copy.jpg")
    shutil.copy(mixed_root / "train/cat/1.jpeg", mixed_root / "val/cat/copy.jpeg")
    done, twice = check(mixed_root), "1 images are there twice (the same bytes)"
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == (
        f"{mixed_root} can be used; look at the {len(done.stderr.splitlines())} thing(s) above"
    )
    assert f"{twice}, under two labels: {mixed_root}/train/cat/0.jpg = " in done.stderr
    assert (
        f"{twice}, to train on and to validate on: {mixed_root}/train/cat/1.jpeg = " in done.stderr
    )


def test_near_equal_images_are_named(tmp_path: Path) -> None:
    """A real photograph in another size and compression; a mirrored one is another, and so are two digits."""
    for place, image in (("train/cat", 0), ("train/dog", 1), ("val/cat", 2), ("val/dog", 3)):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(load_digits().images[image].astype("uint8") * 15).save(
            tmp_path / place / "digit.png"
        )
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    photograph.save(tmp_path / "train/cat/flower.jpg")
    photograph.resize((320, 213)).save(tmp_path / "val/dog/small.jpg", quality=60)
    photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "val/cat/mirrored.jpg")
    done = check(tmp_path)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("1 images are there twice (near-equal), under two labels: ")
    assert "train/cat/flower.jpg = " in line


@pytest.mark.parametrize("step", [1, 40])
def test_frames_of_a_scene_on_both_sides_are_told(tmp_path: Path, step: int) -> None:
    """A camera that moves by a pixel sees nearly the same; by 40 it does not. A column `group` divides no scene."""
    rows = []
    for name in ("china", "flower"):
        photograph = Image.fromarray(load_sample_image(f"{name}.jpg"))
        (tmp_path / name).mkdir()
        for number in range(8):
            left, top = number % 4 * step, number // 4 * step
            photograph.crop((left, top, left + 320, top + 320)).save(
                tmp_path / name / f"{number}.jpg"
            )
            rows.append(
                {"path": f"{name}/{number}.jpg", "label": name, "group": f"{name}{number // 4}"}
            )
    told = told_of_frames(open_source(str(tmp_path), val_fraction=0.5)) or ""
    assert told.startswith("8 of 8 validation images that were looked at look like ") is (
        step == 1
    ), told
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        (writer := csv.DictWriter(file, [*rows[0]])).writeheader()
        writer.writerows(rows)
    assert (
        told_of_frames(
            open_source(str(tmp_path), labels=str(tmp_path / "labels.csv"), val_fraction=0.5)
        )
        is None
    )


def without_class_folders(val: Path) -> None:
    for number, path in enumerate(sorted(val.rglob("*.*"))):
        path.rename(val / f"{number}{path.suffix}")
    for folder in [path for path in val.iterdir() if path.is_dir()]:
        folder.rmdir()


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda train, val: shutil.rmtree(val), "/val does not exist"),
        (
            lambda train, val: without_class_folders(val),
            "do not hold the same class folders: cat, dog, owl",
        ),
        (
            lambda train, val: (val / "cat/0.jpg").rename(val / "0.jpg"),
            "images beside the class folders (1): val/0.jpg",
        ),
        (
            lambda train, val: emptied(train / "cat"),
            "no images in the class folder {root}/train/cat",
        ),
        (lambda train, val: shutil.rmtree(val / "owl"), "do not hold the same class folders: owl"),
        (
            lambda train, val: (train / "cat/0.jpg").rename(train / "cat/0.part"),
            "other files (1): train/cat/0.part",
        ),
        (
            lambda train, val: os.symlink("nowhere", train / "cat/gone"),
            "broken links (1): train/cat/gone",
        ),
        (
            lambda train, val: os.truncate(val / "dog/0.jpg", 400),
            "cannot read the image {root}/val/dog/0.jpg: ",
        ),
        (lambda train, val: emptied(train), "/train holds 0 class folder(s)"),
    ],
)
def test_every_mistake_is_named_in_a_line(
    mixed_root: Path, spoil: Callable[[Path, Path], object], words: str
) -> None:
    spoil(mixed_root / "train", mixed_root / "val")
    done = check(mixed_root)
    assert done.returncode == 2
    (wrong,) = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
    assert words.format(root=mixed_root) in wrong
    assert done.stderr.splitlines()[-1] == f"cait: error: 1 thing(s) wrong with {mixed_root}"


def test_archives_instead_of_folders_are_told(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    done = check(tmp_path)
    assert done.returncode == 2
    assert "still packed: a run with this --data.root unpacks them" in done.stderr


def test_a_check_of_many_images_does_not_say_that_their_bytes_are_not_compared(
    mixed_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cait.extras.datacheck.same_bytes.COMPARED", 5)
    shutil.copy(mixed_root / "train/cat/1.jpeg", mixed_root / "train/cat/copy.jpeg")
    main(["check", str(mixed_root / "train")])
    said = capfd.readouterr()
    assert "1 images are there twice (the same bytes)" in said.out + said.err
    assert "are not compared" not in said.out + said.err
