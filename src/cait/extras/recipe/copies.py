"""Small copies of large images, so that a run reads each large file once and not in every epoch."""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
from pathlib import Path

import PIL
from PIL import Image

from cait import disk
from cait.data.listing import Files
from cait.data.reading import RawImage, Reading, load_rgb, open_image


class Copies:
    """Image files as `cait.data.dataset.Samples`, the large ones read from copies, which the first reading makes.

    A copy holds the pixels that `reading` gives, and reading it once more changes nothing, so a run is the same with
    or without copies. Its name tells path, size and time of the file, so a changed file gets a new one.
    """

    def __init__(self, files: Files, reading: Reading, folder: Path) -> None:
        self.files, self.reading, self.folder = files, reading, folder
        self.name = files.name

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[RawImage, int]:
        """As in `Samples`. A missing file comes as its path: whoever opens it says so."""
        path, label = self.files[index]
        try:
            found = os.stat(path)
        except OSError:
            return path, label
        key = repr((os.path.abspath(path), found.st_size, found.st_mtime_ns, self.reading, PIL.__version__))
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
        copy = self.folder / name[:2] / f"{name}.ppm"
        with suppress(Exception), open_image(copy) as image:  # or missing, or damaged in one of the ways Pillow tells
            image.load()
            return image, label
        return self._copied(path, copy) if self._is_large(path) else path, label

    def _is_large(self, path: str) -> bool:
        with suppress(Exception), open_image(path) as image:
            return self.reading.shrinks(image.size)
        return False

    def _copied(self, path: str, copy: Path) -> Image.Image:
        """Read a large image and keep its copy. Raises UnreadableImageError."""
        image = load_rgb(path, reading=self.reading)
        image.info.clear()  # it is upright now, and would be turned once more
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with disk.whole(copy) as beside:
                image.save(beside, "PPM")  # PNG would halve the size, and take twenty times as long to read
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"no copies of some images in {self.folder}: {reason}; they are read anew", stacklevel=2)
        return image
