"""Folders of planes: known as such, learned from, scored and exported."""

from pathlib import Path

import numpy as np
import pytest
from harness import REPO, parsed, rows
from PIL import Image
from plane_files import FIVE, dicom, tiff

from cait.cli import main
from cait.errors import UserError
from cait.extras.channels import CHANNELS, holds_planes, settings_for

PLACES = ("a/0", "a/1", "b/0", "b/1")


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_folder_of_arrays_or_of_tiff_files_that_pillow_does_not_know_holds_planes(folder):
    assert not holds_planes(folder)
    for place in PLACES:
        np.save(folder / place, FIVE)
    assert holds_planes(folder)
    (folder / "a/0.tif").write_bytes(tiff(FIVE))
    assert holds_planes(folder)


def test_a_folder_of_images_holds_no_planes_though_one_is_damaged(folder):
    for place in PLACES:
        Image.new("RGB", (8, 8)).save(folder / f"{place}.tif")
    assert settings_for(set(), {"data.root": str(folder)}) == {}
    with pytest.raises(UserError, match="it has 3 channels, not 4"):
        settings_for(set(), {"data.root": str(folder), CHANNELS: 4})
    (folder / "a/-.tif").touch()
    assert not holds_planes(folder)


# Runs

SHORT = [
    f"--config={REPO / 'configs/digits.yaml'}",
    "--model.fields={patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}",
    "--data.num_workers=0",
    "--trainer.max_epochs=8",
]
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]


@pytest.fixture
def tiles(photographs, tmp_path, monkeypatch):
    """160 tiles of photographs in two classes: where each is to lie, its pixels in [0, 1] and its class."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    tiles = []
    for number in range(160):
        label = number // 2 % 2
        place = Path("tiles", "train" if number < 128 else "val", "ab"[label])
        place.mkdir(parents=True, exist_ok=True)
        left, top = draw.integers(400, size=2).tolist()
        tile = photographs[number % 2].crop((left, top, left + 16, top + 16))
        tiles.append((place / str(number), np.asarray(tile) / 255, label))
    return tiles


def fit(name, *words):
    main(["fit", "--data.root=tiles", f"--run_name={name}", *CPU, *words])


def accuracy(run):
    return max(float(row["val/acc1"]) for row in rows(Path("logs", run)) if row["val/acc1"])


def data_settings(run):
    settings = parsed(Path(f"logs/{run}/config.yaml"))["data"]
    return [settings[name] for name in ("reader", "reader_args", "mean", "std")]


@pytest.mark.slow
def test_five_bands_are_learned_and_shown(tiles):
    for path, tile, label in tiles:
        gray = tile.mean(axis=2)
        planes = np.dstack([tile, gray, (gray + label) / 2])
        path.with_suffix(".tif").write_bytes(tiff(np.rint(65535 * planes).astype(np.uint16)))
    fit("five", *SHORT)
    assert accuracy("five") >= 95
    fit("three", *SHORT, "--data.reader_args={bands: [0, 1, 2]}")
    assert accuracy("three") <= 75  # none of these tells the classes
    fit("again", *SHORT, "--from=three", "--trainer.max_epochs=1")
    assert data_settings("again") == data_settings("three")
    main(["visualize", "five", "--num_images=1"])
    assert "channels 0, 1 and 2" in Path("logs/five/visualize/index.html").read_text()


@pytest.mark.slow
def test_a_folder_of_dicom_has_a_recipe_of_its_own(tiles, capfd):
    draw = np.random.default_rng(0)
    for path, _, label in tiles:
        _, image = dicom(("CT_small", "MR_small")[label])
        image.PixelData = np.roll(image.pixel_array, draw.integers(64), axis=1).tobytes()
        image.save_as(path.with_suffix(".dcm"))
    fit("scans", "--trainer.max_epochs=4", "--minutes=0.2", "--data.img_size=32")
    assert accuracy("scans") >= 95
    main(["check", "tiles"])
    assert "decoded 160 images as planes" in capfd.readouterr().out
