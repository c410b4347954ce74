"""No image on both sides: files, bytes, a folder that grows; and names of classes that are nearly one."""

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from class_folders import fill as fill_classes
from modules import images_in

from cait.data.source import open_source
from cait.extras import datacheck

CLASSES = ["a", "b", "logs"]


def fill(root: Path, draw: random.Random, start: int = 0) -> None:
    """Add files of a few sizes to three classes; some are copies, links or hard links of files of any class."""
    there = sorted(root.glob("*/*"))
    for label in CLASSES:
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + draw.randrange(8, 40)):
            path = root / label / f"{number:03}.png"
            kind, other = draw.random(), draw.choice(there) if there else None
            if other and kind < 0.1:
                shutil.copy(other, path)
            elif other and kind < 0.2:
                draw.choice([path.symlink_to, path.hardlink_to])(other.resolve())
            else:
                path.write_bytes(
                    b"same" * draw.choice([1, 2000]) + draw.randbytes(9) + b"same" * 2000
                )
            there.append(path)


def of(samples: object, root: Path) -> dict[str, bytes]:
    """Bytes of the images by their path below the root."""
    return {os.path.relpath(path, root): Path(path).read_bytes() for path, _ in samples}  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(8))
def test_no_image_is_on_both_sides_of_a_folder_that_grows(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, root, fraction = random.Random(seed), tmp_path / "images", (0.1, 0.2, 0.3)[seed % 3]
    fill(root, draw)
    every = sorted(root.glob("*/*"))
    source = open_source(str(root), val_fraction=fraction)
    train, val = of(source.train, root), of(source.val, root)
    assert not {*train.values()} & {*val.values()}
    for label in CLASSES:  # as many as ever, and every class on both sides
        count = len([path for path in every if path.parent.name == label])
        assert len([path for path in val if path.startswith(f"{label}/")]) == max(
            1, round(count * fraction)
        )
        assert any(path.startswith(f"{label}/") for path in train)
    left = {str(path.relative_to(root)): path.read_bytes() for path in every}
    copies = left.keys() - train.keys() - val.keys()
    assert all(left[path] in val.values() for path in copies)
    told = f"{len(copies)} of {len(every) - len(val)} training images are left out, because a validation image has"
    assert (told in capsys.readouterr().err) is bool(copies)

    (tmp_path / "held.csv").write_text("\n".join(["path", *val]))
    fill(root, draw, start=100)
    folds = [dict(folds=3, fold=fold) for fold in range(3)]
    for settings in (dict(val_list=str(tmp_path / "held.csv")), *folds):
        grown = open_source(str(root), **settings)  # type: ignore[arg-type]
        of_train, of_val = of(grown.train, root), of(grown.val, root)
        assert not {*of_train.values()} & {*of_val.values()}
        if "val_list" in settings:
            assert of_val == val
            new = [path for path in root.glob("*/1??.png") if path.read_bytes() not in val.values()]
            assert {str(path.relative_to(root)) for path in new} <= of_train.keys()


def test_a_class_of_copies_alone_is_kept_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/1", "a/2", "b/1", "b/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(name[:1].encode())
    assert len(open_source(str(tmp_path)).train) == 2
    assert (
        "2 of 2 training images are copies of validation images; their class has no others"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("names", ["Dog dog cat c\u200bat", "seg_train seg_test"])
def test_names_that_may_be_meant_otherwise_are_told(
    names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_classes(tmp_path, dict.fromkeys(names.split(), 2))
    datacheck.callbacks(SimpleNamespace(data=images_in(tmp_path)))  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    if "seg" in names:
        assert "seg_test, seg_train are taken for classes; see --data.train_split" in line
    else:
        assert "'Dog' and 'dog', " in line
        assert r"'cat' and 'c\u200bat' differ" in line
    fill_classes(tmp_path / "plain", {"cat": 2, "dog": 2})
    datacheck.callbacks(SimpleNamespace(data=images_in(tmp_path / "plain")))  # type: ignore[arg-type]
    assert not capsys.readouterr().err
