"""What lies in people's folders of images: which of it is data, and what of it is held out."""

from pathlib import Path

import pytest
from class_folders import write_files
from harness import parsed

from cait.data.folder import scan_flat
from cait.data.source import open_source
from cait.errors import UserError

LAYOUTS = parsed(Path(__file__).with_name("layouts.yaml"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["case"])
def test_a_folder_is_listed_as_it_is_laid_out(layout, tmp_path):
    root = write_files(tmp_path / "photos:v2", layout["files"])  # though it looks like module:name
    for name, target in layout.get("links", {}).items():
        link = root / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
    source = open_source(str(root))
    assert source.class_names == layout["classes"]
    images = [*source.train, *source.val]
    assert len(images) == layout["images"]
    assert {label for _, label in images} == {*range(len(layout["classes"]))}
    assert source.left_out == layout.get("left_out", {})


def test_a_class_folder_whose_name_is_no_text_is_refused(tmp_path):
    root = write_files(tmp_path, ["a/1.png", "a/2.png", "K\udce4se/1.png", "K\udce4se/2.png"])
    with pytest.raises(UserError, match="K\N{REPLACEMENT CHARACTER}se"):
        _ = open_source(str(root)).class_names


def test_images_are_found_from_a_folder_beside(tmp_path, monkeypatch):
    write_files(tmp_path / "images", ["a/1.png", "a/2.png", "b/1.png", "b/2.png"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert len(open_source("../images").train) == 2
    assert len(scan_flat(Path("../images"))) == 4


def test_the_embedded_data_set_appears_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/digits").mkdir(parents=True)
    source = open_source("data/digits")
    assert len(source.class_names) == 10  # before `prepare`, because the model is built first
    assert len(source.train) == 1437
