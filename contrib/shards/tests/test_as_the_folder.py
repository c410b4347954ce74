"""Shards are the folder: each setting of the data does on them what it does on the folder, or is refused in a line."""

import contextlib
from pathlib import Path

import pytest
from class_folders import fill
from harness import parsed
from PIL import ExifTags, Image
from same import same
from shard_sets import make

from cait import plugins
from cait.cli import main
from cait.data.datamodule import DataSettings, ImageNetDataModule
from cait.data.folder import FolderSource
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.evaluation.extra_sets import open_test
from cait.settings import names_in
from contrib.shards import Shards

TABLE = parsed(Path(__file__).with_name("settings.yaml"))
VALUES = TABLE["values"]
OF_SHARDS = {"root", *names_in(Shards)}
BASE = dict(img_size=16, batch_size=4, num_workers=0, repeats=1, mixup=0, cutmix=0)
HALVES = ["divided", "whole"]
"""A folder with splits, and one without."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder that is divided, with a test split, and one that is not; clear and turned images among them."""
    folder = tmp_path_factory.mktemp("folders")
    for split in ("train", "val", "test", "learn"):
        fill(folder / "divided" / split, {"a": 6, "b": 6})
    fill(folder / "whole", {"a": 10, "b": 10})
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for path in folder.rglob("001.png"):
        image = Image.open(path)
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(path, exif=turned)
    for name, text in TABLE["files"].items():
        (folder / name).write_text(text)
    make(folder / "divided", folder / "divided-shards", "--images=3")
    with contextlib.chdir(folder / "whole"):
        make(".", folder / "whole-shards", "--images=3")
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(folders, monkeypatch):
    monkeypatch.chdir(folders)


def seen(root, **settings):
    """What a run gets of the data, by names, classes and batches; or the line that refuses the settings."""
    try:
        data = ImageNetDataModule(str(root), **(BASE | settings))
        data.setup("fit")
        test = open_test(data.source)
        batches = [*data.train_dataloader(), *data.val_dataloader()]
    except UserError as error:
        return str(error)
    names = []
    for samples in (data.source.train, data.source.val, test.samples if test else ()):
        names += [Path(samples.name(index)).parts[-2:] for index in range(len(samples))]
    return data.class_names, names, data.settings.mixes, batches


def refuses(root, source, name, settings):
    """Whether `cait fit` refuses a setting that does nothing with these images."""
    useless = {*getattr(source, "without_use", FolderSource.divided_by)}
    return name in useless | {*plugins.without_use(root, {"root": root, **settings})}


def test_the_table_has_each_setting_of_the_data():
    assert VALUES.keys() == {*names_in(DataSettings)}


@pytest.mark.parametrize("folder", HALVES)
@pytest.mark.parametrize("name", sorted(VALUES.keys() - OF_SHARDS))
def test_a_setting_does_on_shards_what_it_does_on_their_folder_or_is_refused(name, folder):
    shards = f"{folder}-shards"
    settings = TABLE["beside"].get(name, {}) | {name: VALUES[name]}
    ours = seen(folder, **settings)
    theirs = seen(shards, **settings)
    if not isinstance(theirs, str):
        assert refuses(shards, open_source(shards), name, settings) or same(ours, theirs)
    elif theirs.replace(shards, folder) != ours:  # the line is about shards, and says of what
        assert "\n" not in theirs
        assert any(f"data.{word}" in theirs for word in settings), theirs


@pytest.mark.parametrize("name", TABLE["of_the_making"])
@pytest.mark.parametrize("folder", HALVES)
def test_a_setting_of_the_making_divides_the_shards_as_a_run_divides_the_folder(
    name, folder, tmp_path, capsys
):
    shards = tmp_path / "shards"
    settings = {name: VALUES[name]}
    ours = seen(folder, **settings)
    source = open_source(folder, **settings)
    words = [folder, shards, "--images=3", f"--{name}={VALUES[name]}"]
    if isinstance(ours, str) or refuses(folder, source, name, settings):
        with pytest.raises(SystemExit):
            make(*words)
        assert capsys.readouterr().err.count("error:") == 1
        assert not shards.exists()
    else:
        make(*words)
        assert same(ours, seen(shards))


@pytest.mark.parametrize("change", ["--raw", "--max_side=8"])
def test_a_reader_of_files_is_refused_on_pixels(change, tmp_path):
    shards = make("divided", tmp_path / "shards", change)
    line = seen(shards, auto_augment=None, reader=VALUES["reader"])
    assert "data.reader" in line


def test_images_of_several_classes_are_not_packed_as_images_of_one(tmp_path, capsys):
    class Several(ImageNetDataModule):
        def make_source(self):
            return open_source("whole", labels="labels.csv", multi_label=True)

    shards = tmp_path / "shards"
    with pytest.raises(SystemExit):
        main(["shards", "whole", str(shards)], data=Several)
    assert "several classes" in capsys.readouterr().err
    assert not shards.exists()
