"""Shards are the folder: each setting of the data does on them what it does on the folder, or is refused in a line."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import ExifTags, Image

from cait import plugins
from cait.cli import main
from cait.data.datamodule import DataSettings, ImageNetDataModule
from cait.data.folder import FolderSource
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.evaluation.extra_sets import open_test
from cait.settings import names_in
from contrib.shards import Shards

BASE: dict[str, Any] = dict(img_size=16, batch_size=4, num_workers=0, repeats=1, mixup=0, cutmix=0)
LABELS = "path,label,split\n"
OTHERS: dict[str, Any] = {
    "augment_ops": ["PIL.ImageOps:invert"],
    "auto_augment": None,
    "backend": "timm",
    "background": "black",
    "balance": "sqrt",
    "cache_gb": 3.0,
    "check_resume": False,
    "class_names": ["x", "y"],
    "color_jitter": 0.4,
    "crop_pct": 0.5,
    "cutmix": 1.0,
    "data_dir": "elsewhere",
    "download": True,
    "erase_prob": 1.0,
    "eval_batch_size": 3,
    "exif_orientation": False,
    "fit": "pad",
    "fold": 1,
    "folds": 2,
    "global_batch": True,
    "group_by": r"(\d)\.",
    "hflip": 1.0,
    "img_size": 8,
    "in_chans": 1,
    "input_key": "other",
    "interpolation": "bilinear",
    "labels": "labels.csv",
    "max_bad_share": 0.5,
    "mean": (0.1, 0.2, 0.3),
    "mix_mode": "elem",
    "mix_prob": 0.5,
    "mix_switch_prob": 0.1,
    "mixup": 0.5,
    "multi_label": True,
    "num_workers": 1,
    "order": "windowed",
    "ratio": (1.0, 1.0),
    "reader": "cait.extras.channels.planes:read",
    "reader_args": {"nodata": 0},
    "repeats": 3,
    "root": "nowhere",
    "batch_size": 2,
    "scale": (0.5, 0.5),
    "seed": 7,
    "shrink": 8,
    "std": (0.1, 0.2, 0.3),
    "target_key": "other",
    "train_split": "learn",
    "val_fraction": 0.4,
    "val_list": "held_out.csv",
    "val_split": "test",
    "window": 2,
}
"""Another value of each setting of the data."""
BESIDE: dict[str, dict[str, Any]] = {
    "fold": {"folds": 2},
    "multi_label": {"labels": "labels.csv"},
    "reader": {"auto_augment": None},
    "reader_args": {"reader": OTHERS["reader"], "auto_augment": None},
    "mix_mode": {"mixup": 0.5},
}
"""What a setting needs."""
MAKING = {"train_split", "val_split", "val_list", "val_fraction", "labels", "group_by"}
"""Settings of the making that say which image is where."""


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 4), np.uint8)
    return Image.fromarray(pixels[..., : 4 if number % 3 == 0 else 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is divided, with a test split, and one that is not; turned images and clear ones among them."""
    folder = tmp_path_factory.mktemp("folders")
    numbers = count()
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for split in ("train", "val", "test", "learn"):
        for name in "ab":
            (place := folder / "divided" / split / name).mkdir(parents=True)
            for number in range(8 if split == "train" else 4):
                exif = turned if number == 1 else Image.Exif()
                picture(next(numbers)).save(place / f"{number}.png", exif=exif)
    rows = [LABELS]
    for name in "ab":
        (place := folder / "whole" / name).mkdir(parents=True)
        for number in range(10):
            picture(next(numbers)).save(place / f"{number}.png")
            split = "test" if number == 9 else "val" if number > 6 else "train"
            rows.append(f"{name}/{number}.png,{'xy'[number % 2]},{split}\n")
    (folder / "labels.csv").write_text("".join(rows))
    (folder / "held_out.csv").write_text("path\na/3.png\na/4.png\nb/0.png\nb/9.png\n")
    for name in ("divided", "whole"):
        main(
            [
                "shards",
                str(folder / name),
                str(folder / f"{name}-shards"),
                "--images=3",
                "--workers=0",
            ]
        )
    return folder


def seen(root: Path, **settings: Any) -> Any:
    """What a run gets of the data, by names, classes and batches; or the line that refuses the settings."""
    try:
        data = ImageNetDataModule(str(root), **{**BASE, **settings})
        data.setup("fit")
        test = open_test(data.source)
        batches = [*data.train_dataloader(), *data.val_dataloader()]
    except UserError as error:
        return str(error)
    names = [
        Path(samples.name(index)).parts[-2:]
        for samples in (data.source.train, data.source.val, test.samples if test else ())
        for index in range(len(samples))
    ]
    return data.class_names, names, data.settings.mixes, batches


def is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list | tuple) and not isinstance(theirs, str):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    return ours == theirs


def refuses(root: Path, source: Any, name: str, settings: dict[str, Any]) -> bool:
    """Whether `cait fit` refuses a setting that does nothing with these images."""
    useless = {*getattr(source, "without_use", FolderSource.divided_by)}
    return name in useless | {*plugins.without_use(str(root), {"root": str(root), **settings})}


def test_the_table_has_each_setting_of_the_data() -> None:
    assert {*OTHERS} == {*names_in(DataSettings)}


@pytest.mark.parametrize("folder", ["divided", "whole"])
@pytest.mark.parametrize("name", sorted({*OTHERS} - {"root", *names_in(Shards)}))
def test_a_setting_does_on_shards_what_it_does_on_their_folder_or_is_refused(
    name: str, folder: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    root = Path(folder)
    shards = Path(f"{folder}-shards")
    settings = BESIDE.get(name, {}) | {name: OTHERS[name]}
    ours = seen(root, **settings)
    theirs = seen(shards, **settings)
    if not isinstance(theirs, str):
        is_refused = refuses(shards, open_source(str(shards)), name, settings)
        assert is_refused or is_same(ours, theirs)
    elif (
        theirs.replace(str(shards), folder) != ours
    ):  # it is about shards, in a line that says of what
        assert "\n" not in theirs
        assert any(f"data.{word}" in theirs for word in (name, *settings)), theirs


@pytest.mark.parametrize("name", sorted(MAKING))
@pytest.mark.parametrize("folder", ["divided", "whole"])
def test_a_setting_of_the_making_divides_the_shards_as_a_run_divides_the_folder(
    name: str,
    folder: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folders)
    settings = {name: OTHERS[name]}
    out = tmp_path / "shards"
    given = ["shards", folder, str(out), "--images=3", "--workers=0", f"--{name}={OTHERS[name]}"]
    ours = seen(Path(folder), **settings)
    source = open_source(folder, **settings)
    if isinstance(ours, str) or refuses(Path(folder), source, name, settings):
        with pytest.raises(SystemExit) as stop:
            main(given)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("error:") == 1
        assert not out.exists()
        return
    main(given)
    assert is_same(ours, seen(out))


def write_planes(path: Path, number: int, kind: str) -> None:
    pixels = np.random.default_rng(number).integers(0, 60000, (20, 24, 3)).astype(np.uint16)
    if kind == "array":
        np.save(path.with_suffix(".npy"), pixels)
    elif kind == "gray":
        Image.fromarray(pixels[..., 0]).save(path.with_suffix(".png"))
    else:
        pixels = np.concatenate([pixels] * 2, axis=2) if kind == "bands" else pixels
        style = "rgb" if kind == "color" else "minisblack"
        tifffile.imwrite(path.with_suffix(".tif"), pixels, photometric=style, planarconfig="contig")


@pytest.mark.parametrize("kind", ["array", "gray", "color", "bands"])
def test_planes_keep_their_depth_or_are_refused_when_they_are_packed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        for name in "ab":
            (place := tmp_path / "planes" / split / name).mkdir(parents=True)
            for number in range(4):
                write_planes(place / str(number), number, kind)
    given = ["shards", str(tmp_path / "planes"), str(tmp_path / "out"), "--workers=0"]
    for changed in (["--raw"], ["--max_side=8"]):
        with pytest.raises(SystemExit) as stop:
            main([*given, *changed])
        assert stop.value.code == 2
        assert "more than 8 bits a channel" in capsys.readouterr().err
    main(given)
    channels = {"gray": 1, "bands": 6}.get(kind, 3)
    settings = BESIDE["reader"] | dict(
        reader=OTHERS["reader"], in_chans=channels, mean=[0.5] * channels, std=[0.5] * channels
    )
    assert is_same(seen(tmp_path / "planes", **settings), seen(tmp_path / "out", **settings))


@pytest.mark.parametrize("changed", ["--raw", "--max_side=8"])
def test_a_reader_of_files_is_refused_on_pixels(
    changed: str, folders: Path, tmp_path: Path
) -> None:
    main(["shards", str(folders / "divided"), str(tmp_path / "out"), "--workers=0", changed])
    line = seen(tmp_path / "out", auto_augment=None, reader=OTHERS["reader"])
    assert "data.reader reads whole files: make the shards again" in line


def test_images_of_several_classes_are_not_packed_as_images_of_one(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Several(ImageNetDataModule):
        def make_source(self) -> Any:
            return open_source("whole", labels="labels.csv", multi_label=True)

    monkeypatch.chdir(folders)
    with pytest.raises(SystemExit):
        main(["shards", "whole", str(tmp_path / "out")], data=Several)
    assert "may have several classes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
