"""One table of a run's images: path, label, group and split of each, in arrays; and the list of those held out."""

import copy
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray

from cait import disk
from cait.data.listing import Labeled, LeftOut, below, below_root, composed
from cait.errors import UserError, abbreviate

UNUSED, TRAIN, VAL, TEST = 0, 1, 2, 4
"""What the column `splits` may say; TRAIN | VAL is for both."""


class Images:
    """A table of images, as `cait.data.dataset.Samples`: each has a path, a label, a group and a split.

    The columns are arrays. A list of a million tuples would be copied into every worker, page by page, because
    reading an object changes its reference count.

    Args:
        samples: pairs of a path and the index of its class.
        prefix: what every path begins with.
        label_names: what the labels stand for.
    """

    def __init__(
        self, samples: Iterable[Labeled], prefix: str = "", label_names: Sequence[str] = ()
    ) -> None:
        paths = bytearray()
        ends = array("q", [0])
        labels = array("i")
        for path, label in samples:
            paths += path[len(prefix) :].encode(errors="surrogateescape")
            ends.append(len(paths))
            labels.append(label)
        self._prefix = prefix
        self._paths = bytes(paths)
        self._ends = ends
        """Where each path begins in `_paths`, and where the last one ends."""
        self._labels = np.asarray(labels)
        self._rows = np.arange(len(labels), dtype=np.int32)
        """The rows of these images in the columns above; tables that are made by `select` share the columns."""
        self.splits = np.full(len(labels), TRAIN, np.uint8)
        """The split of each image [N]."""
        self.label_names = [*label_names]
        self.groups: ndarray | None = None
        """The index in `group_names` of each image's group [N]; None if there are no groups."""
        self.group_names: list[str] = []
        """The sorted names of the groups."""
        self.left_out: LeftOut = {}
        """Paths of what was not listed, by the reason."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Labeled]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Labeled:
        return self.name(index), int(self._labels[self._rows[index]])

    def name(self, index: int) -> str:
        row = self._rows[index]
        path = self._paths[self._ends[row] : self._ends[row + 1]]
        return self._prefix + path.decode(errors="surrogateescape")

    @property
    def labels(self) -> array:
        """The index of each image's class."""
        return array("i", self._labels[self._rows].tobytes())

    def group(self, index: int) -> str:
        """The name of an image's group; empty if there are no groups."""
        return "" if self.groups is None else self.group_names[self.groups[index]]

    def select(self, chosen: ndarray) -> "Images":
        """The images at these places, in this order, or where a mask [N] is true."""
        images = copy.copy(self)
        images._rows = self._rows[chosen]
        images.splits = self.splits[chosen]
        images.groups = None if self.groups is None else self.groups[chosen]
        return images

    def split_into(self, splits: ndarray) -> "Images":
        """The same images with another column `splits`."""
        images = copy.copy(self)
        images.splits = splits.astype(np.uint8)
        return images

    def in_split(self, split: int) -> "Images":
        return self.select(self.splits & split > 0)

    def grouped(self, names: Sequence[str]) -> "Images":
        """The same images, each in the group of this name."""
        images = copy.copy(self)
        images.group_names = sorted({*names})
        index_of = {name: index for index, name in enumerate(images.group_names)}
        images.groups = np.array([index_of[name] for name in names], np.int32)
        return images


def rows_by_class(labels: ndarray) -> list[ndarray]:
    """The rows of each class, the class of the first row first."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order])) + 1
    return sorted(np.split(order, starts), key=lambda rows: rows[:1].tolist())


def evenly_chosen(images: Images, fraction: float) -> ndarray:
    """Where a share of each class is [N], evenly over its images, for validation.

    Raises UserError if a class has one image alone.
    """
    chosen = np.zeros(len(images), bool)
    for rows in rows_by_class(np.asarray(images.labels)):
        size = len(rows)
        if size < 2:
            raise UserError(
                f"{images.name(rows[0])} is the only image of its class; two are needed to hold one out"
            )
        count = min(max(1, round(size * fraction)), size - 1)
        middles = (2 * np.arange(count) + 1) * size // (2 * count)  # of so many equal parts
        chosen[rows[middles]] = True
    return chosen


def listed_among(images: Images, root: Path, file: Path) -> ndarray:
    """Where the images are [N] that a CSV file lists, as a run's validation.csv.

    Raises UserError if the file cannot be read, lists no image, or one that is not among `images`.
    """
    listed = set(held_out_paths(file, root))
    names = (composed(below(root, images.name(index))) for index in range(len(images)))
    chosen = np.fromiter((name in listed for name in names), bool, len(images))
    if missing := listed.difference(
        composed(below(root, path)) for path, _ in images.select(chosen)
    ):
        raise UserError(
            f"{file} names images that are not in {root}: {abbreviate(sorted(missing))}; "
            "put them back, or take their lines out of the file"
        )
    if not listed:
        raise UserError(f"{file} names no images to hold out")
    return chosen


def held_out_paths(file: Path, root: str | Path = "") -> list[str]:
    """The paths below `root` that a CSV file lists in its column `path`, with composed letters.

    Raises UserError if the file cannot be read.
    """
    return [
        composed(below_root(root, row["path"]))
        for _, row in disk.read_csv(file, str(file))
        if row["path"]
    ]


def write_held_out(
    file: Path, images: Images, root: str | Path, label_names: Sequence[str]
) -> None:
    """List the images that a run holds out, so that others hold out the same."""
    disk.write_csv(
        file, ["path", "class"], [(below(root, path), label_names[label]) for path, label in images]
    )
