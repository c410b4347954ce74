"""`cait check`: what it counts, and the mistakes that it is for."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from cait.cli import main


def run(root: Path, *options: str) -> int:
    try:
        main(["check", str(root), *options])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_folder_without_fault(mixed_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/cat/.thumbnails", "train/__MACOSX", "val/.trash"):  # which a run leaves out
        (mixed_root / name).mkdir()
        shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / name / "0.jpg")
    assert run(mixed_root) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 classes, 36 training and 15 validation images\ndecoded 51 images")
    # Class folders alone.
    assert run(mixed_root / "train", "--images", "7") == 0
    assert "decoded 7 images" in capsys.readouterr().out


def test_copies_of_an_image_are_named(mixed_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / "train/dog/copy.jpg")
    shutil.copy(mixed_root / "train/cat/1.jpeg", mixed_root / "val/cat/copy.jpeg")
    assert run(mixed_root) == 0
    told = capsys.readouterr().err
    assert f"1 images are there twice (the same bytes), under two labels: {mixed_root}/train/cat/0.jpg = " in told
    assert (
        f"1 images are there twice (the same bytes), to train on and to validate on: {mixed_root}/train/cat/1.jpeg = "
        in told
    )


def test_near_equal_images_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real photograph in another size and compression; a mirrored one is another, and so are two digits."""
    for place, image in (("train/cat", 0), ("train/dog", 1), ("val/cat", 2), ("val/dog", 3)):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(load_digits().images[image].astype("uint8") * 15).save(tmp_path / place / "digit.png")
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    photograph.save(tmp_path / "train/cat/flower.jpg")
    photograph.resize((320, 213)).save(tmp_path / "val/dog/small.jpg", quality=60)
    photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "val/cat/mirrored.jpg")
    assert run(tmp_path) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1 images are there twice (near-equal), under two labels: ")
    assert "train/cat/flower.jpg = " in line


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no val", "/val does not exist"),
        ("flat val", "do not hold the same class folders: cat, dog, owl"),
        ("some flat", "1 images beside the class folders: val/0.jpg"),
        ("empty class", "no images in the class folder {root}/train/cat"),
        ("class only in train", "do not hold the same class folders: owl"),
        ("text", "1 other files: train/cat/0.jpg.part"),
        ("broken link", "1 broken links: train/cat/gone"),
        ("truncated", "cannot read the image {root}/val/dog/5.JPEG: "),
        ("nothing", "/train holds 0 class folder(s)"),
    ],
)
def test_every_mistake_is_named_in_a_line(
    mixed_root: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    train, val = mixed_root / "train", mixed_root / "val"
    if kind == "no val":
        shutil.rmtree(val)
    elif kind == "flat val":
        for number, path in enumerate(sorted(val.rglob("*.*"))):
            path.rename(val / f"{number}{path.suffix}")
        for name in ("cat", "dog", "owl"):
            (val / name).rmdir()
    elif kind == "some flat":
        (val / "cat" / "0.jpg").rename(val / "0.jpg")
    elif kind == "empty class":
        shutil.rmtree(train / "cat")
        (train / "cat").mkdir()
    elif kind == "class only in train":
        shutil.rmtree(val / "owl")
    elif kind == "text":
        (train / "cat" / "0.jpg").rename(train / "cat" / "0.jpg.part")
    elif kind == "broken link":
        os.symlink("nowhere", train / "cat" / "gone")
    elif kind == "truncated":
        (val / "dog" / "5.JPEG").write_bytes((train / "dog" / "5.JPEG").read_bytes()[:1500])
    else:
        shutil.rmtree(train)
        train.mkdir()
    assert run(mixed_root) == 2
    said = capsys.readouterr()
    wrong = [line for line in said.out.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 1
    assert words.format(root=mixed_root) in wrong[0]
    assert said.err.splitlines()[-1] == f"cait: error: 1 thing(s) wrong with {mixed_root}"


def test_archives_instead_of_folders_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    assert run(tmp_path) == 2
    assert "still packed: a run with this --data.root unpacks them" in capsys.readouterr().err
