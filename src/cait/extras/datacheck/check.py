"""`cait check`: count the images of a data set, decode a sample, and say what is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cait.cli.options import Options
from cait.data.folder import FolderSource, abbreviate, not_listed
from cait.data.listing import BESIDE, BROKEN, OTHER
from cait.data.reading import load_rgb
from cait.data.source import open_source
from cait.errors import UserError
from cait.file_lock import tell
from cait.run.program import Program

FAULTS = (BESIDE, BROKEN, OTHER)
"""What is left out of a folder by mistake."""
THUMBNAIL, SAME = 32, 4.0
"""Side of a thumbnail, and the mean difference of two, in grey levels, below which they show the same."""


def check(arguments: list[str], program: Program) -> None:
    """Print what is in a folder, then a line for each thing that is wrong with it."""
    options = Options("check", "Count the images of a data folder and decode some.")
    options.add_argument("root", metavar="DIR", type=Path, help="with train/<class>/ and val/<class>/")
    many = "how many to decode, evenly over all; default 2000"
    options.add_argument("--images", type=int, default=2000, metavar="N", help=many)
    given = options.parse_args(arguments)
    root = given.root
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist")
    wrong = list(_faults(open_source(str(root)), given.images))
    for line in wrong:
        print(f"wrong: {line}")
    if wrong:
        raise UserError(f"{len(wrong)} thing(s) wrong with {root}")
    print(f"{root} is as it should be")


def _faults(source: Any, images: int) -> Iterator[str]:
    """What a run would refuse, or else what is damaged or left out by mistake."""
    if hasattr(source, "verify") and (damaged := list(source.verify())):  # as that of shards does
        yield from damaged
        return
    try:
        names, train, val = source.class_names, source.train, source.val
    except UserError as error:
        yield str(error)
        return
    print(f"{len(names):,} classes, {len(train):,} training and {len(val):,} validation images", flush=True)
    if isinstance(source, FolderSource):
        faults = {why: paths for why, paths in source.left_out.items() if why in FAULTS}
        yield from (f"{len(paths):,} {why}: {abbreviate(paths)}" for why, paths in faults.items())
        if others := {why: paths for why, paths in source.left_out.items() if why not in FAULTS}:
            tell(f"{source.root}{not_listed(others)}")
    seen, unreadable = _decoded(train, val, images)
    yield from unreadable
    for line in _copies(seen.values()):
        tell(line)


class Seen(NamedTuple):
    """An image that was decoded."""

    name: str
    label: int
    is_held_out: bool
    thumbnail: np.ndarray
    """uint8 [THUMBNAIL, THUMBNAIL, 3]"""


def _decoded(train: Any, val: Any, images: int) -> tuple[dict[str, list[Seen]], list[str]]:
    """Decode so many images, evenly over both sets.

    Returns:
        the images by their perceptual hash, which those that look alike share, and a line for each unreadable one.
    """
    import imagehash

    seen = defaultdict[str, list[Seen]](list)
    unreadable: list[str] = []
    total = len(train) + len(val)
    count = min(images, total)
    for place in (number * total // count for number in range(count)):
        samples, index = (train, place) if place < len(train) else (val, place - len(train))
        try:
            raw, label = samples[index]
            image = load_rgb(raw, samples.name(index))
        except UserError as error:
            unreadable.append(str(error))
            continue
        thumbnail = np.asarray(image.resize((THUMBNAIL, THUMBNAIL)))
        seen[str(imagehash.phash(image))].append(Seen(samples.name(index), label, samples is val, thumbnail))
    spread = "" if count == total else f" of {total:,}, spread evenly"
    failed = f", {len(unreadable):,} cannot be read" if unreadable else ""
    print(f"decoded {count - len(unreadable):,} images{spread}{failed}")
    return seen, unreadable


def _copies(alike: Iterable[list[Seen]]) -> Iterator[str]:
    """A line about images that are there under two labels, and one about those in both sets.

    They have the same hash, and their thumbnails hardly differ, as after another compression or a change of size.
    """
    labels: list[str] = []
    sets: list[str] = []
    for first, *others in alike:
        for other in others:
            if np.abs(first.thumbnail.astype(int) - other.thumbnail).mean() >= SAME:
                continue
            if first.label != other.label:
                labels.append(f"{first.name} = {other.name}")
            elif first.is_held_out != other.is_held_out:
                sets.append(f"{first.name} = {other.name}")
    for kind, found in (("under two labels", labels), ("to train on and to validate on", sets)):
        if found:
            yield f"{len(found):,} images are there twice, {kind}: {abbreviate(found)}"
