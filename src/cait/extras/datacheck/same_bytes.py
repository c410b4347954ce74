"""Images that are there twice, byte for byte."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from cait import disk
from cait.data.folder import FolderSource
from cait.data.table import TEST, TRAIN, UNUSED, VAL, Images
from cait.errors import UserError, tell_once

COMPARED = 50_000
"""Images that are compared at the start of a run that holds out some: a second or two on a local disk."""
checked = set[Path]()
"""Roots whose images `cait check` compares, all of them, in this process."""
MIDDLE = 1 << 12
"""Bytes in the middle of a file that are compared before the whole."""
BLOCK = 1 << 20
"""Bytes that are read at once."""


def without_copies(source: FolderSource, images: Images) -> Images:
    """The images, where none trains that has the same bytes as one that is held out.

    Copies stay if a class has no others. Lines say how many those are, or that there are more images than `COMPARED`.
    """
    if len(images) > COMPARED:
        if source.root not in checked:
            tell_once(
                f"{source.root}: the bytes of {len(images):,} images are not compared; `cait check` does it"
            )
        return images
    labels = np.asarray(images.labels)
    trains = images.splits == TRAIN
    copies = trains & _copies_of_held_out(images)
    others = source.classes_of(np.unique(labels[trains & ~copies]))
    lonely = [
        label for label in np.unique(labels[copies]) if not source.classes_of([label]) <= others
    ]
    only_copies = copies & np.isin(labels, lonely)
    divided = source.without(images, copies & ~only_copies, "a validation image has the same bytes")
    if lonely:
        tell_once(
            f"{source.root}: {only_copies.sum():,} of {trains.sum():,} training images are copies of validation "
            "images; their class has no others"
        )
    return divided


def _copies_of_held_out(images: Images) -> np.ndarray:
    """Where images have the same bytes as one that is held out, bool [N]."""
    is_copy = np.zeros(len(images), bool)
    is_held_out = images.splits & (VAL | TEST) > 0
    used = np.flatnonzero(images.splits != UNUSED)
    for same in same_bytes(images.select(used)):
        rows = used[same]
        is_copy[rows] = is_held_out[rows].any()
    return is_copy


def show_nothing(indices: list[int], title: str) -> Iterable[int]:
    return indices


def same_bytes(
    images: Images, progress: Callable[[list[int], str], Iterable[int]] = show_nothing
) -> list[list[int]]:
    """The indices of images that have the same bytes, two or more at a time, each time in order.

    Only a file whose size another has is opened, and only one whose middle another has too is read whole. A file that
    cannot be read has no like. `progress` gives back the indices that it gets, and shows how far they are under the
    title that it gets.
    """
    groups = [[*range(len(images))]]
    middle = partial(_digest, size=MIDDLE)  # files that are not compressed often begin alike
    for title, fingerprint in (("sizes", _size), ("parts", middle), ("contents", _digest)):
        group_of = {index: number for number, group in enumerate(groups) for index in group}
        alike = defaultdict[tuple[int, int], list[int]](list)
        for index in progress([*group_of], title):
            value = fingerprint(images.name(index))
            if value >= 0:
                alike[group_of[index], value].append(index)
        groups = [group for group in alike.values() if len(group) > 1]
    return groups


def _size(path: str) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return -1


def _digest(path: str, size: int | None = None) -> int:
    """63 bits that differ with the bytes of a file, or with `size` of them in its middle; -1 if it cannot be read."""
    digest = blake2b(digest_size=8)
    with suppress(OSError, UserError), disk.open_file(path) as file:
        if size is not None:
            file.seek(max(0, (os.fstat(file.fileno()).st_size - size) // 2))
            digest.update(file.read(size))
        else:
            while block := file.read(BLOCK):
                digest.update(block)
        return int.from_bytes(digest.digest()) >> 1
    return -1
