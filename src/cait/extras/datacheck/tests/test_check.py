"""`cait check`: what it counts, and the mistakes that it is for."""

import shutil
from collections.abc import Callable
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


def test_copies_of_an_image_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in another size and compression; a mirrored photograph is another, and so are two digits."""
    for place, image in (("train/cat", 0), ("train/dog", 1), ("val/cat", 2), ("val/dog", 3)):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(load_digits().images[image].astype("uint8") * 15).save(tmp_path / place / "digit.png")
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    photograph.save(tmp_path / "train/cat/flower.jpg")
    photograph.resize((320, 213)).save(tmp_path / "val/dog/small.jpg", quality=60)
    photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "val/cat/mirrored.jpg")
    shutil.copy(tmp_path / "train/cat/flower.jpg", tmp_path / "val/cat/same.jpg")
    assert run(tmp_path) == 0
    labels, sets = capsys.readouterr().err.splitlines()
    flower = tmp_path / "train/cat/flower.jpg"
    assert labels == f"1 images are there twice, under two labels: {flower} = {tmp_path}/val/dog/small.jpg"
    assert sets == f"1 images are there twice, to train on and to validate on: {flower} = {tmp_path}/val/cat/same.jpg"


def flatten(val: Path) -> None:
    for number, path in enumerate(sorted(val.rglob("*.*"))):
        path.rename(val / f"{number}{path.suffix}")
    for folder in [*val.glob("*/")]:
        folder.rmdir()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1500])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: shutil.rmtree(root / "val"), "/val does not exist"),
        (lambda root: flatten(root / "val"), "do not hold the same class folders: cat, dog, owl"),
        (lambda root: (root / "val/cat/0.jpg").rename(root / "val/0.jpg"), "1 images beside the class folders: val/0"),
        (lambda root: empty(root / "train/cat"), "no images in the class folder {root}/train/cat"),
        (lambda root: shutil.rmtree(root / "val/owl"), "do not hold the same class folders: owl"),
        (lambda root: (root / "train/cat/a.part").touch(), "1 other files: train/cat/a.part"),
        (lambda root: (root / "train/cat/gone").symlink_to("nowhere"), "1 broken links: train/cat/gone"),
        (lambda root: truncate(root / "train/dog/5.JPEG"), "cannot read the image {root}/train/dog/5.JPEG: "),
        (lambda root: empty(root / "train"), "/train holds 0 class folder(s)"),
    ],
)
def test_every_mistake_is_named_in_a_line(
    mixed_root: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], words: str
) -> None:
    spoil(mixed_root)
    assert run(mixed_root) == 2
    said = capsys.readouterr()
    wrong = [line for line in said.out.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 1
    assert words.format(root=mixed_root) in wrong[0]
    assert said.err.splitlines()[-1] == f"cait: error: 1 thing(s) wrong with {mixed_root}"
