"""Pictures that are turned, transparent or gray: each path has the pixels that people see."""

from io import BytesIO

import pytest
from encoded_image import encoded
from modules import images_in
from PIL import ExifTags, Image, ImageOps
from same import same

from cait.data.datamodule import ImageNetDataModule

FOLDERS = ["train/cat", "train/dog", "val/cat", "val/dog"]


def write(root, files):
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
        for name, data in files.items():
            (root / folder / name).write_bytes(data)
    return root


@pytest.fixture
def roots(photographs, tmp_path):
    """A turned JPEG file, a clip art with hidden colors and a gray file in each class; and what people see in them."""
    photo = photographs[0].resize((72, 48))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    jpeg = encoded(photo, exif=turned)
    art = photo.convert("RGBA")
    art.putalpha(Image.linear_gradient("L").resize(photo.size))
    gray = photo.convert("LA")
    on_white = Image.alpha_composite(Image.new("RGBA", art.size, "white"), art)
    files = {"a.jpg": jpeg, "b.png": encoded(art, "PNG"), "c.png": encoded(gray, "PNG")}
    seen = {
        "a.png": encoded(ImageOps.exif_transpose(Image.open(BytesIO(jpeg))), "PNG"),
        "b.png": encoded(on_white.convert("RGB"), "PNG"),
        "c.png": encoded(gray.convert("RGB"), "PNG"),
    }
    return write(tmp_path / "files", files), write(tmp_path / "seen", seen)


class OwnTransform(ImageNetDataModule):
    def make_train_transform(self):
        return self.settings.transform()


SETTINGS = dict(img_size=32, batch_size=6, num_workers=0, repeats=1, mixup=0, cutmix=0)


def first_batches(data):
    data.setup("fit")
    loaders = [data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()]
    return [next(iter(loader))[0] for loader in loaders]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(ImageNetDataModule, "auto"), (ImageNetDataModule, "timm"), (OwnTransform, "auto")],
)
def test_every_path_sees_what_people_see(roots, kind, backend):
    files, seen = (first_batches(kind(str(root), backend=backend, **SETTINGS)) for root in roots)
    assert same(files, seen)


@pytest.mark.parametrize("settings", [dict(exif_orientation=False), dict(background=None)])
def test_as_published_orientation_and_background_do_not_count(roots, settings):
    files, seen = (images_in(root, **SETTINGS, **settings) for root in roots)
    assert not same(first_batches(files), first_batches(seen))
