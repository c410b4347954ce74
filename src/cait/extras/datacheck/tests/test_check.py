"""`cait imagenet-check`: what it counts, and every mistake that it is for."""

import os
import shutil
from pathlib import Path

import formats
import pytest
from PIL import Image

from cait.cli import main
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.datacheck import check


def run(root: Path, *options: str) -> int:
    try:
        main(["imagenet-check", str(root), *options])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_folder_without_fault(mixed_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(mixed_root) == 0
    said = capsys.readouterr().out
    assert f"{mixed_root}/train: 3 classes, 36 images" in said
    assert f"{mixed_root}/val: 3 classes, 15 images" in said
    assert "decoded 51 images" in said
    assert "ImageNet" not in said
    # Class folders alone.
    assert run(mixed_root / "train", "--images", "7") == 0
    assert "decoded 7 images" in capsys.readouterr().out


def test_what_a_run_leaves_out_is_not_counted(mixed_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(mixed_root)
    before = capsys.readouterr().out
    for name in ("train/cat/.thumbnails", "train/__MACOSX", "val/.trash"):
        (mixed_root / name).mkdir()
        shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / name / "0.jpg")
    assert run(mixed_root) == 0
    assert capsys.readouterr().out == before


@pytest.mark.parametrize(
    ("names", "links"),
    [
        ("Training/a Training/b Validation/a Validation/b", {}),
        ("Bus Car Train", {}),
        ("Bus Car Train Test", {}),
        ("a b", {"c": "../store"}),
        ("a b", {"a/again": "."}),
        ("train/cr\u00e8me train/b val/cre\u0300me val/b", {}),
        ("Training/a Training/b Validation/a", {}),
        ("Train/a Train/b", {}),
        ("a", {}),
        ("a b", {"b/again": "../a"}),
        ("a b K\udce4se", {}),
        ("train/a train/b", {"val/a": "../train/b", "val/b": "../train/a"}),
    ],
)
def test_it_passes_what_a_run_takes_and_refuses_what_a_run_refuses(
    names: str, links: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate([*(f"root/{name}" for name in names.split()), "store"] * 2):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    for link, target in links.items():
        (tmp_path / "root" / link).parent.mkdir(exist_ok=True)
        (tmp_path / "root" / link).symlink_to(target)
    try:
        assert all(open_source(str(tmp_path / "root")).sets)
        refused = None
    except UserError as error:
        refused = str(error)
    assert run(tmp_path / "root") == (2 if refused else 0), refused
    assert capsys.readouterr().out.count("wrong: ") == bool(refused)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no val", "/val does not exist"),
        ("flat val", "/val holds 15 images and no class folders"),
        ("some flat", "1 image(s) in "),
        ("empty class", "1 class(es) without images in "),
        ("class only in train", "1 class(es) only in {root}/train: owl"),
        ("class only in val", "1 class(es) only in {root}/val: emu"),
        ("text", "1 file(s) without an image's extension, which are left out: {root}/train/cat/0.jpg.part"),
        ("truncated", "cannot read the image {root}/val/dog/5.JPEG: "),
        ("nothing", "/train holds no class folders"),
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
    elif kind == "class only in val":
        shutil.copytree(val / "owl", val / "emu")
    elif kind == "text":
        (train / "cat" / "0.jpg").rename(train / "cat" / "0.jpg.part")
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
    assert said.err == f"cait: error: 1 thing(s) wrong with {mixed_root}\n"


def test_archives_instead_of_folders_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "imagenet"
    formats.write_imagenet(root, monkeypatch, photographs)
    assert run(root) == 2
    assert "still packed: a run with this --data.root unpacks them" in capsys.readouterr().out


def test_imagenets_numbers_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photographs: list[Image.Image], capsys: pytest.CaptureFixture[str]
) -> None:
    formats.save(photographs, tmp_path / "one.JPEG", 0)
    root = tmp_path / "imagenet"
    for label in range(1000):
        for part in ("train", "val"):
            folder = root / part / f"n{label:08d}"
            folder.mkdir(parents=True)
            os.link(tmp_path / "one.JPEG", folder / "0.JPEG")
    assert run(root, "--images", "3") == 2
    said = capsys.readouterr().out
    assert f"wrong: {root}/train holds 1,000 images, ImageNet 1,281,167" in said
    assert f"wrong: {root}/val holds 1,000 images, ImageNet 50,000" in said
    monkeypatch.setattr(check, "IMAGENET_IMAGES", {"train": 1000, "val": 1000})
    assert run(root, "--images", "3") == 0


def test_the_sample_is_spread_over_classes_and_files() -> None:
    read: list[str] = []
    found = [[f"c{label}/{i:02d}" for i in range(20)] for label in range(10)]
    assert list(check._decode(found, 25, read.append)) == []
    counts = [sum(name.startswith(f"c{label}/") for name in read) for label in range(10)]
    assert sum(counts) == 25
    assert set(counts) == {2, 3}
    assert [name for name in read if name.startswith("c0/")] == ["c0/05", "c0/15"]
    read.clear()
    assert list(check._decode(found, 5, read.append)) == []
    assert len({name.split("/")[0] for name in read}) == 5
