"""`cait check`: what it counts, and the mistakes that it is for."""

import pytest
from harness import call
from PIL import Image
from sklearn.datasets import load_sample_image

from cait.data.source import open_source
from cait.extras.frames import told_of_frames


def test_near_equal_images_are_named(tmp_path):
    """A real photograph in another size and compression; a mirrored or a turned one is another."""
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / place).mkdir(parents=True)
    flower.save(tmp_path / "train/cat/flower.jpg")
    flower.resize((320, 213)).save(tmp_path / "val/dog/small.jpg", quality=60)
    flower.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "val/cat/mirrored.jpg")
    flower.rotate(180).save(tmp_path / "train/dog/turned.jpg")
    [line] = call(tmp_path, "check", str(tmp_path)).stderr.splitlines()
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
