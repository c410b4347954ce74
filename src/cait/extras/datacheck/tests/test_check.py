"""`cait check`: what it counts, and the mistakes that it is for."""

import os
import shutil

import pytest
from harness import call
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from cait.data.source import open_source
from cait.extras.frames import told_of_frames


def check(root, *options):
    return call(root, "check", str(root), *options)


def test_a_folder_without_fault(mixed_root):
    for name in ("train/cat/.thumbnails", "train/__MACOSX", "val/.trash"):  # which a run leaves out
        (mixed_root / name).mkdir()
        shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / name)
    done = check(mixed_root)
    assert done.returncode == 0
    counts = "3 classes, 36 training and 15 validation images\ndecoded 51 images"
    assert done.stdout.startswith(counts)
    # Class folders alone.
    assert "decoded 7 images" in check(mixed_root / "train", "--images", "7").stdout


@pytest.mark.parametrize("compared", [50_000, 5])
def test_copies_of_an_image_are_named_however_many_a_run_compares(
    compared, mixed_root, monkeypatch
):
    monkeypatch.setattr("cait.extras.datacheck.same_bytes.COMPARED", compared)
    shutil.copy(mixed_root / "train/cat/0.jpg", mixed_root / "train/dog/copy.jpg")
    shutil.copy(mixed_root / "train/cat/1.jpeg", mixed_root / "val/cat/copy.jpeg")
    done = check(mixed_root)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert f"look at the {len(lines)} thing(s)" in done.stdout
    labels, sides = (line for line in lines if "the same bytes" in line)
    assert f"under two labels: {mixed_root}/train/cat/0.jpg = " in labels
    assert f"to train on and to validate on: {mixed_root}/train/cat/1.jpeg = " in sides
    assert "not compared" not in done.stderr


def test_near_equal_images_are_named(tmp_path):
    """A real photograph in another size and compression; a mirrored one is another, and so are two digits."""
    digits = load_digits().images.astype("uint8") * 15
    for number, folder in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(digits[number]).save(tmp_path / folder / "digit.png")
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    flower.save(tmp_path / "train/cat/flower.jpg")
    flower.resize((320, 213)).save(tmp_path / "val/dog/small.jpg", quality=60)
    flower.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "val/cat/mirrored.jpg")
    done = check(tmp_path)
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert "near-equal" in line
    assert f"{tmp_path}/train/cat/flower.jpg = {tmp_path}/val/dog/small.jpg" in line


def save_frames(root, step):
    """Two scenes, each seen by a camera that moves by so many pixels."""
    for name in ("china", "flower"):
        (root / name).mkdir()
        photograph = Image.fromarray(load_sample_image(f"{name}.jpg"))
        for number in range(8):
            left, top = number % 4 * step, number // 4 * step
            frame = photograph.crop((left, top, left + 320, top + 320))
            frame.save(root / name / f"{number}.jpg")


@pytest.mark.parametrize(("step", "is_told"), [(1, True), (40, False)])
def test_frames_of_a_scene_on_both_sides_are_told(step, is_told, tmp_path):
    save_frames(tmp_path, step)
    line = told_of_frames(open_source(str(tmp_path), val_fraction=0.5))
    assert bool(line) is is_told
    assert not line or line.startswith("8 of 8 validation images")


def test_frames_that_are_grouped_are_on_one_side(tmp_path):
    save_frames(tmp_path, 1)
    source = open_source(str(tmp_path), group_by=r"(\d)\.jpg", val_fraction=0.5)
    assert told_of_frames(source) is None


# What is wrong


def wrong(root):
    """The one mistake that is named."""
    done = check(root)
    assert done.returncode == 2
    [line] = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
    return line


def test_what_a_run_would_refuse_is_named(mixed_root):
    shutil.rmtree(mixed_root / "val/owl")
    assert "class folders: owl" in wrong(mixed_root)


def test_what_is_left_out_is_named(mixed_root):
    train = mixed_root / "train"
    (train / "cat/0.jpg").rename(train / "cat/0.part")
    (mixed_root / "val/cat/0.jpg").rename(mixed_root / "val/0.jpg")
    os.symlink("nowhere", train / "cat/gone")
    line = wrong(mixed_root)
    assert "other files (1): train/cat/0.part" in line
    assert "images beside the class folders (1): val/0.jpg" in line
    assert "broken links (1): train/cat/gone" in line


def test_an_image_that_cannot_be_read_is_named(mixed_root):
    os.truncate(mixed_root / "val/dog/0.jpg", 400)
    assert f"{mixed_root}/val/dog/0.jpg" in wrong(mixed_root)
