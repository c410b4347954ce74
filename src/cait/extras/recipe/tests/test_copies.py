"""Large images halved as they are read, and the small copies that are kept of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded_image import encoded
from PIL import Image

from cait.data.datamodule import ImageNetDataModule
from cait.data.listing import Files
from cait.data.reading import Reading, UnreadableImageError, load_rgb
from cait.extras.recipe.copies import Copies

SMALL = Reading(shrink=50)


@pytest.mark.parametrize(
    ("size", "halved"),
    [((99, 300), (99, 300)), ((100, 300), (50, 150)), ((401, 800), (51, 100)), ((1700, 1601), (54, 51))],
)
def test_images_are_halved_while_their_shorter_side_keeps_so_many_pixels(
    size: tuple[int, int], halved: tuple[int, int], photographs: list[Image.Image]
) -> None:
    photo = photographs[0].resize(size)
    assert load_rgb(photo, reading=SMALL).size == halved
    means = np.asarray(photo, np.float64)
    while min(means.shape[:2]) >= 100:  # the mean of four pixels, or of two or one at an odd side
        padded = np.pad(means, [(0, side % 2) for side in means.shape[:2]] + [(0, 0)], mode="edge")
        means = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(np.asarray(load_rgb(photo, reading=SMALL)), means, atol=3)


def folder_of(root: Path, photographs: list[Image.Image]) -> Files:
    """Two classes of large and small images, with alpha, on their side, and one that is cut off."""
    names = []
    for label, name in enumerate(("a", "b")):
        (root / name).mkdir(parents=True)
        photo = photographs[label]
        turned = Image.Exif()
        turned[0x0112] = 8
        photo.save(root / name / "large.jpg", exif=turned)
        photo.resize((60, 40)).save(root / name / "small.png")
        art = photo.resize((300, 200)).convert("RGBA")
        art.putalpha(Image.linear_gradient("L").resize(art.size))
        art.save(root / name / "art.png")
        names += [(str(path), label) for path in sorted((root / name).iterdir())]
    return Files(names)


def written(copies: Copies) -> list[Path]:
    return [*copies.folder.rglob("*.ppm")]


def test_a_copy_has_the_pixels_of_its_image_and_is_read_in_its_place(
    tmp_path: Path, photographs: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder_of(tmp_path / "photos", photographs)
    copies = Copies(files, SMALL, tmp_path / "copies")
    names = [path for path, _ in files]
    expected = [load_rgb(path, reading=SMALL).tobytes() for path in names]
    for attempt in ("makes them", "has them"):
        read = [copies[index] for index in range(len(copies))]
        assert [label for _, label in read] == list(files.labels), attempt
        assert [load_rgb(raw, reading=SMALL).tobytes() for raw, _ in read] == expected, attempt
        large = [Path(name).stem for name, (raw, _) in zip(names, read, strict=True) if isinstance(raw, Image.Image)]
        assert large == ["art", "large"] * 2, attempt
        assert len(written(copies)) == 4, attempt

    def never(*_: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr("cait.extras.recipe.copies.load_rgb", never)
    assert isinstance(copies[0][0], Image.Image)


def test_a_changed_file_and_other_settings_get_new_copies_and_a_torn_copy_is_made_anew(
    tmp_path: Path, photographs: list[Image.Image]
) -> None:
    path = tmp_path / "a.png"
    photographs[0].save(path)
    files = Files([(str(path), 0)])
    copies = Copies(files, SMALL, tmp_path / "copies")
    first = load_rgb(copies[0][0], reading=SMALL).tobytes()
    (copy,) = written(copies)
    copy.write_bytes(copy.read_bytes()[:-100])
    assert load_rgb(copies[0][0], reading=SMALL).tobytes() == first
    assert load_rgb(Image.open(copy)).tobytes() == first
    photographs[1].save(path)
    os.utime(path, ns=(1, 1))
    assert load_rgb(copies[0][0], reading=SMALL).tobytes() == load_rgb(path, reading=SMALL).tobytes() != first
    _ = Copies(files, Reading(shrink=20), tmp_path / "copies")[0]
    assert len(written(copies)) == 3


def test_an_image_that_cannot_be_read_is_named_and_a_disk_that_cannot_be_written_is_told(
    tmp_path: Path, photographs: list[Image.Image]
) -> None:
    whole = encoded(photographs[0], quality=90)
    (tmp_path / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "whole.jpg").write_bytes(whole)
    names = [str(tmp_path / name) for name in ("torn.jpg", "whole.jpg", "missing.jpg")]
    files = Files((name, 0) for name in names)
    copies = Copies(files, SMALL, tmp_path / "copies")
    with pytest.raises(UnreadableImageError, match=r"torn\.jpg"):
        copies[0]
    assert copies[2][0] == names[2]  # whoever opens it says that it is missing
    (tmp_path / "file").write_text("in the way")
    hindered = Copies(files, SMALL, tmp_path / "file")
    with pytest.warns(UserWarning, match=r"no copies of some images in .*file: Not a directory; they are read anew"):
        image, _ = hindered[1]
    assert load_rgb(image).tobytes() == load_rgb(names[1], reading=SMALL).tobytes()


def test_batches_are_the_same_with_and_without_copies(tmp_path: Path, photographs: list[Image.Image]) -> None:
    folder_of(tmp_path / "photos", photographs)
    settings = dict(img_size=16, batch_size=2, num_workers=0, shrink=50, val_fraction=0.34, seed=3)
    found = []
    for copies_dir in (None, str(tmp_path / "copies"), str(tmp_path / "copies")):
        data = ImageNetDataModule(str(tmp_path / "photos"), copies_dir=copies_dir, **settings)  # type: ignore[arg-type]
        data.setup("fit")
        trained = [image for images, _ in data.train_dataloader() for image in images]
        data.setup("predict")
        held = [image for images, _ in data.predict_dataloader() for image in images]
        found.append(torch.stack([*trained, *held]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
