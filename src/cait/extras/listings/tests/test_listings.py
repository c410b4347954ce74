"""The listing of image folders: torchvision's order, kept for the next start, and never out of date."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from cait.data.listing import Files, list_images
from cait.extras.listings import kept as kept_listing

NAMES = ["10", "2", "cat"]
HOUR = 3_600_000_000_000


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_listing, "KEPT_FROM", 1)
    root = tmp_path / "images"
    for place in ("10/b.png", "10/a.JPEG", "10/deep/er/c.jpg", "2/notes.txt", "2/d.webp", "cat/ä.jpg", "cat/x/y.bmp"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(b"")
    (tmp_path / "store/er").mkdir(parents=True)
    (tmp_path / "store/er/f.jpg").write_bytes(b"")
    (root / "2/linked").symlink_to(tmp_path / "store")
    (root / "cat/empty").mkdir()
    settle(root)
    return root


def settle(root: Path) -> None:
    """Make every folder an hour old."""
    for folder in [root, *(path for path in root.parent.rglob("*") if path.is_dir())]:
        changed = folder.stat().st_mtime_ns - HOUR
        os.utime(folder, ns=(changed, changed))


def kept(root: Path) -> list[Path]:
    return list((root.parent / "cache").rglob("*.npz"))


def marked(root: Path) -> Files:
    """List, and show whether the kept listing was read: it is changed so that all labels are 7."""
    (path,) = kept(root)
    import numpy as np

    content = dict(np.load(path))
    content["labels"][:] = 7
    np.savez(path, **content)
    return list_images(root, NAMES)


def test_the_order_is_torchvisions(root: Path) -> None:
    expected = ImageFolder(str(root)).samples
    assert list(list_images(root, NAMES)) == expected
    assert len(kept(root)) == 1
    assert list(list_images(root, NAMES)) == expected  # the kept one
    turned = list_images(root, NAMES[::-1])  # another list of classes is another listing
    assert [path for path, _ in turned] == [path for path, _ in expected]
    assert [label for _, label in turned] == [2 - label for _, label in expected]
    moved = shutil.move(root, root.with_name("moved"))
    assert list_images(moved, NAMES).name(0) == str(moved / "10/a.JPEG")


def test_a_relative_folder_names_its_images_relatively(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_images(root, NAMES)
    monkeypatch.chdir(root.parent)
    assert marked(root).labels[0] == 7
    found = list_images(Path("images"), NAMES)
    assert (found.name(0), found.labels[0]) == ("images/10/a.JPEG", 7)


@pytest.mark.parametrize("place", ["10", "10/deep/er", "cat/empty", "2/linked"])
def test_a_change_anywhere_is_noticed(place: str, root: Path) -> None:
    list_images(root, NAMES)
    assert set(marked(root).labels) == {7}
    (root / place / "new.jpg").write_bytes(b"")
    assert list(list_images(root, NAMES)) == ImageFolder(str(root)).samples


def test_a_listing_of_new_folders_is_not_kept(root: Path) -> None:
    (root / "10/new.jpg").write_bytes(b"")
    list_images(root, NAMES)
    assert not kept(root)


def test_a_listing_of_folders_without_times_of_their_own_is_not_kept(root: Path) -> None:
    for folder in [root, *(path for path in root.parent.rglob("*") if path.is_dir())]:
        os.utime(folder, ns=(0, 0))  # as a bucket that is mounted
    list_images(root, NAMES)
    assert not kept(root)


def test_a_torn_listing_and_a_home_that_is_read_only_do_no_harm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ImageFolder(str(root)).samples
    list_images(root, NAMES)
    (path,) = kept(root)
    path.write_bytes(path.read_bytes()[:-100])
    assert list(list_images(root, NAMES)) == expected
    (root.parent / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent / "file"))
    assert list(list_images(root, NAMES)) == expected
