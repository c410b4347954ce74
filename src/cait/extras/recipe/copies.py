"""Small copies of large images, so that a run reads each large file once and not in every epoch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import PIL
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch.utils.data import DataLoader, Dataset

from cait import disk
from cait.data.datamodule import CHECKED_IMAGES, ImageNetDataModule
from cait.data.dataset import Samples
from cait.data.listing import Files
from cait.data.reading import RawImage, Reading, UnreadableImageError, load_rgb
from cait.settings import group

FEW = 32
"""So few missing copies are made without worker processes."""


class Copies:
    """`Samples` whose large image files are read from copies, which are made when they are missing.

    A copy holds the pixels that `reading` gives, and reading it once more changes nothing, so a run is the same with
    or without copies. They are named after path, size and time of the file and Pillow's version, so a changed file gets
    a new one.

    Args:
        reading: how a file becomes RGB. Those that it shrinks are the large ones.
        folder: where the copies are.
    """

    def __init__(self, samples: Samples, reading: Reading, folder: Path) -> None:
        self.samples, self.reading, self.folder = samples, reading, folder
        self.name = samples.name

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[RawImage, int]:
        raw, label = self.samples[index]
        path = self._path(raw)
        if path is None:
            return raw, label
        with suppress(Exception):  # missing, or damaged in one of the ways that Pillow tells
            copy = Image.open(path)
            copy.load()
            return copy, label
        return (self._make(raw, path)[0] if self._is_large(raw) else raw), label

    def missing(self, rank: int = 0, processes: int = 1) -> Iterator[int]:
        """The large images that have no copy; of `processes` each gets a part."""
        for index in range(rank, len(self), processes):
            with suppress(UnreadableImageError):  # the run will meet it
                raw, _ = self.samples[index]
                path = self._path(raw)
                if path is not None and not path.is_file() and self._is_large(raw):
                    yield index

    def make(self, index: int) -> str:
        """Make the copy of a large image. Returns why it could not be written, or nothing."""
        raw, _ = self.samples[index]
        path = self._path(raw)
        with suppress(UnreadableImageError):  # the run will meet it
            return self._make(raw, path)[1] if path is not None else ""
        return ""

    def _path(self, raw: RawImage) -> Path | None:
        """Where the copy of a file is; None for what is no file."""
        if not isinstance(raw, str | Path):
            return None
        try:
            found = os.stat(raw)
        except OSError:
            return None
        key = repr((os.path.abspath(raw), found.st_size, found.st_mtime_ns, self.reading, PIL.__version__))
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.ppm"

    def _is_large(self, raw: RawImage) -> bool:
        with suppress(Exception), Image.open(raw) as image:  # type: ignore[arg-type]
            return self.reading.shrinks(image.size)
        return False

    def _make(self, raw: RawImage, path: Path) -> tuple[Image.Image, str]:
        """A large image, and why its copy could not be written. Raises UnreadableImageError."""
        image = load_rgb(raw, reading=self.reading)
        image.info.clear()  # it is upright now, and would be turned once more
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with disk.whole(path) as beside:
                image.save(beside, "PPM")  # PNG would halve the size, and take twenty times as long to read
        except OSError as error:
            return image, error.strerror or str(error)
        return image, ""


class _Missing(Dataset[str]):
    def __init__(self, images: Sequence[tuple[Copies, int]]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> str:
        copies, index = self.images[place]
        return copies.make(index)


def make(sets: Sequence[Copies], rank: int, processes: int, workers: dict[str, Any]) -> None:
    """Make this process's part of the copies that are missing.

    Nobody waits for the other processes: an image without a copy is read from its file.

    Args:
        rank: number of this process among the `processes` of the run.
        workers: the loader's settings of processes to make them in.
    """
    missing = [(copies, index) for copies in sets for index in copies.missing(rank, processes)]
    if not missing:
        return
    rank_zero_info(f"copies    of large images are made once, in {sets[0].folder}")
    loader = DataLoader(_Missing(missing), None, **(workers if len(missing) > FEW else {}))
    columns = ("          images", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    problem = ""
    with Progress(*columns, disable=rank > 0) as bar:
        for found in bar.track(loader, total=len(missing)):
            problem = problem or found
    if problem:
        rank_zero_warn(f"no copies of some images in {sets[0].folder}: {problem}; they are read anew in each epoch")


def wrap(samples: Samples, settings: Mapping[str, Any]) -> Samples:
    """Image files by way of copies; other samples as they are."""
    if not isinstance(samples, Files):
        return samples
    return Copies(samples, group(Reading, settings), Path(settings["copies_dir"]))


def make_missing(data: ImageNetDataModule) -> None:
    """Make the copies of a run's images, if there are not too many images to look at each."""
    sets = [images.samples for images in (data.train_images, data.val_images)]
    if sum(map(len, sets)) <= CHECKED_IMAGES:
        make([samples for samples in sets if isinstance(samples, Copies)], *data.rank_and_world(), data.processes())
