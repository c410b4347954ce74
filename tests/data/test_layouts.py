"""What lies in people's folders of images: names, nests, formats, sizes, and a split that is written down."""

import csv
from pathlib import Path

import numpy as np
import pytest
from class_folders import fill
from PIL import Image

from cait.data.folder import not_listed
from cait.data.listing import OTHER
from cait.data.reading import Reading, load_image
from cait.data.source import open_source
from cait.errors import UserError


def listed(root: Path, **settings) -> list[list[str]]:
    source = open_source(str(root), **settings)
    return [
        [str(Path(path).relative_to(root)) for path, _ in samples]
        for samples in (source.train, source.val)
    ]


def test_names_nests_hidden_files_and_gifs(tmp_path: Path) -> None:
    """What lies in people's folders: every image is taken, and nothing else."""
    names = ["it's mine", "Vögel und so", 'the "best" 車']
    for name in names:
        fill(tmp_path, {f"{name}/2024/summer": 2, name: 1})
        fill(tmp_path, {name: 1}, suffix=".GIF")
        (tmp_path / name / "._000.png").write_bytes(b"of macOS")
        (tmp_path / name / "notes.txt").write_text("stray")
        fill(tmp_path / name, {".thumbnails": 1})
    fill(tmp_path, {".hidden": 2, "__MACOSX": 2})
    Image.new("RGB", (8, 8)).save(tmp_path / "beside.png")
    source = open_source(str(tmp_path))
    assert source.class_names == sorted(names)
    assert (len(source.train), len(source.val)) == (9, 3)
    assert source.left_out["images beside the class folders"] == ["beside.png"]
    assert [Path(path).name for path in source.left_out["other files"]] == ["notes.txt"] * 3


def test_photographs_of_telephones_are_read(tmp_path: Path, photographs: list[Image.Image]) -> None:
    assert not_listed({OTHER: ["a/1.HEIC"]}).startswith(
        "; left out: other files (1): a/1.HEIC; to read .heic"
    )
    pytest.importorskip("pillow_heif")
    turned = Image.Exif()
    turned[0x0112] = 6
    for label, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        photographs[label].save(
            tmp_path / name / "1.HEIC", "HEIF", quality=95, exif=turned.tobytes()
        )
        photographs[label].save(tmp_path / name / "2.avif", quality=95)
    source = open_source(str(tmp_path))
    assert (len(source.train), len(source.val)) == (2, 2)
    for path, label in (*source.train, *source.val):
        photo = photographs[label]
        expected = photo.transpose(Image.Transpose.ROTATE_270) if path.endswith("HEIC") else photo
        assert np.abs(np.asarray(load_image(path), int) - np.asarray(expected, int)).mean() < 4


@pytest.mark.parametrize(
    ("size", "halved"),
    [
        ((99, 300), (99, 300)),
        ((100, 300), (50, 150)),
        ((401, 800), (51, 100)),
        ((1700, 1601), (54, 51)),
    ],
)
def test_images_are_halved_while_their_shorter_side_keeps_so_many_pixels(
    size: tuple[int, int], halved: tuple[int, int], photographs: list[Image.Image], tmp_path: Path
) -> None:
    photo, shrunk = photographs[0].resize(size), Reading(shrink=50)
    assert load_image(photo, reading=shrunk).size == halved
    means = np.asarray(photo, np.float64)
    while min(means.shape[:2]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        padded = np.pad(means, [(0, side % 2) for side in means.shape[:2]] + [(0, 0)], mode="edge")
        means = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(np.asarray(load_image(photo, reading=shrunk)), means, atol=3)
    photo.save(tmp_path / "photo.jpg")
    with Image.open(tmp_path / "photo.jpg") as opened:
        assert load_image(opened, reading=shrunk).size == halved
        assert opened.size == size  # the caller's image is as it was


def test_the_split_can_be_written_down_and_used_again(tmp_path: Path) -> None:
    root = fill(tmp_path / "photos", {"a": 20, "b": 2})
    val = listed(root)[1]
    assert [Path(name).parent.name for name in val] == ["a", "a", "b"]
    kept = tmp_path / "validation.csv"
    with kept.open("w", newline="") as file:
        names = [(root / val[0]).absolute(), f"./{val[1]}", *val[2:]]
        csv.writer(file).writerows([("path", "class"), *((name, "") for name in names)])
    fill(root, {"a": 30})  # more images: a new split would hold out others
    assert listed(root)[1] != val
    again = listed(root, val_list=str(kept))
    assert again[1] == val
    assert not set(val) & set(again[0])
    (root / val[0]).unlink()
    with pytest.raises(UserError, match="names images that are not in"):
        listed(root, val_list=str(kept))
