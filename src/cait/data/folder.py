"""Image folders: list their images and read one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageColor
from torchvision.datasets.folder import IMG_EXTENSIONS

from cait.data.listing import Files, list_images
from cait.data.unreadable import UnreadableImageError, UnreadableImages
from cait.errors import UserError

# Whether EXIF data are whole is no concern of a run: what can be read of them counts.
warnings.filterwarnings("ignore", message="Corrupt EXIF data")

RawImage = str | Path | IO[bytes] | Image.Image
"""An image as a data set has it: a path, an open file, or already decoded."""


ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, by its EXIF orientation. 1 is upright."""


class Reading(NamedTuple):
    """How a file becomes RGB; the fields are `cait.datamodule.ImageNetDataModule`'s settings."""

    exif_orientation: bool = True
    background: str | None = "white"

    def check(self) -> None:
        """Raise UserError if Pillow does not know the colour."""
        if self.background is None:
            return
        try:
            opaque = len(ImageColor.getrgb(self.background)) == 3
        except ValueError:
            opaque = False
        if not opaque:
            raise UserError(f"background must be a colour, as white or '#8090a0', or null; got {self.background!r}")


AS_SEEN = Reading()
"""As viewers show an image, on white."""
PUBLISHED = Reading(exif_orientation=False, background=None)
"""As torchvision's ImageFolder reads, and so timm's loaders and the published recipes."""


def load_rgb(image: RawImage, name: str = "", reading: Reading = AS_SEEN) -> Image.Image:
    """Read an image in any of Pillow's formats and modes as RGB; errors call it by its path, or else by `name`.

    Raises:
        UnreadableImageError: the file is missing, truncated or not an image.
    """
    try:
        with image if isinstance(image, Image.Image) else Image.open(image) as opened:
            opened.load()
            upright = ORIENTATIONS.get(orientation(opened)) if reading.exif_orientation else None
            return _as_rgb(opened if upright is None else opened.transpose(upright), reading.background)
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, ValueError, struct.error ...
        reason = "not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        path = image if isinstance(image, str | Path) else name
        raise UnreadableImageError(f"cannot read the image {path}: {reason}") from error


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 of an image without EXIF data, and where they are broken."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as Pillow's decoders do
        return 1
    return value if value in ORIENTATIONS else 1


def _as_rgb(image: Image.Image, background: str | None) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey: Pillow would cut them off at 255 instead of scaling
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    pixels = image.convert("RGBA")
    if background is not None:
        pixels = Image.alpha_composite(Image.new("RGBA", pixels.size, background), pixels)
    return pixels.convert("RGB")


def check_headers(samples: Files, unreadable: UnreadableImages) -> None:
    """Open each file without decoding it, and note those that are not images."""
    for path, _ in samples:
        try:
            with Image.open(path):
                pass
        except Exception:
            try:
                load_rgb(path)
            except UnreadableImageError as error:
                unreadable.note(path, str(error))


def class_names(root: Path, train_split: str) -> list[str]:
    """The sorted names of the class folders.

    Raises:
        UserError: there is no such folder, or it holds fewer than two class folders.
    """
    folder = _class_root(root, train_split)
    names = _folder_names(folder)
    if len(names) < 2:
        raise UserError(
            f"{folder} holds {len(names)} class folder(s), at least 2 are needed: {folder}/<class>/<image>.jpg"
        )
    return names


def scan(root: Path, names: list[str], train_split: str, val_split: str, val_fraction: float) -> tuple[Files, Files]:
    """List the training and validation images of the classes `names` below `root`.

    `root/train_split` and `root/val_split` are the two sets. A `root` that holds the class folders itself is
    divided: validation takes a share of `val_fraction` (at least one image) from every class, evenly over its
    sorted files.

    Raises:
        UserError: a folder is missing, a class has no images, or the sets have different classes.
    """
    if not (root / train_split).is_dir():
        return _hold_out(_list_images(root, names), val_fraction)
    val_root = root / val_split
    if not val_root.is_dir():
        raise UserError(f"{val_root} does not exist; validation images belong in {val_root}/<class>/")
    val_names = _folder_names(val_root)
    if val_names != names:
        odd = sorted(set(names) ^ set(val_names))
        raise UserError(f"{root / train_split} and {val_root} do not hold the same class folders: {abbreviate(odd)}")
    return _list_images(root / train_split, names), _list_images(val_root, names)


def scan_flat(root: Path) -> Files:
    """List every image below `root`, sorted, with the label -1.

    Raises:
        UserError: there is no such folder, or no image in it.
    """
    if root.is_file():
        raise UserError(f"{root} is a file; name the folder that it is in")
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not paths:
        raise UserError(f"no images below {root}")
    return Files((str(path), -1) for path in paths)


def scan_extra_val(root: Path, names: list[str]) -> Files:
    """List the images of another evaluation set of the same classes, such as ImageNet-V2.

    Its class folders have the classes' names, or as in ImageNet-V2 their indices. Indices sorted as text would
    stand in another order: 0, 1, 10, 100, 101, ...

    Raises:
        UserError: there is no such folder, or it has other classes than `names`.
    """
    if not root.is_dir():
        raise UserError(f"the folder {root} does not exist")
    found, indices = set(_folder_names(root)), [str(index) for index in range(len(names))]
    if found == set(names):
        return _list_images(root, names)
    if found == set(indices):
        return _list_images(root, indices)
    raise UserError(
        f"{root} holds {len(found)} class folders, which are neither the model's {len(names)} classes by name "
        f"nor 0 to {len(names) - 1}"
    )


def _folder_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:  # which knows folders from files without asking for each
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _class_root(root: Path, train_split: str) -> Path:
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist; name yours with --data.root")
    return root / train_split if (root / train_split).is_dir() else root


def _list_images(folder: Path, names: list[str]) -> Files:
    files = list_images(folder, names)
    empty = set(range(len(names))) - set(files.labels)
    if empty:
        folders = abbreviate([str(folder / names[label]) for label in sorted(empty)])
        raise UserError(f"no images in the class folder {folders}")
    return files


def _hold_out(samples: Files, fraction: float) -> tuple[Files, Files]:
    by_class: dict[int, list[tuple[str, int]]] = {}
    for sample in samples:
        by_class.setdefault(sample[1], []).append(sample)
    train: list[tuple[str, int]] = []
    val: list[tuple[str, int]] = []
    for members in by_class.values():
        if len(members) < 2:
            raise UserError(f"{Path(members[0][0]).parent} holds one image; two are needed to hold one out")
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held = {(2 * i + 1) * len(members) // (2 * count) for i in range(count)}
        for position, sample in enumerate(members):
            (val if position in held else train).append(sample)
    return Files(train), Files(val)


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first of the names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
