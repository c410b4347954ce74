"""`cait check`: count the images of a data set, decode a sample, and say what is wrong."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from rich.progress import Progress

from cait import plugins
from cait.cli.options import Options
from cait.data.folder import FolderSource, not_listed
from cait.data.reading import AS_SEEN, Reading, load_image
from cait.data.source import open_source
from cait.data.table import TRAIN, VAL, Images
from cait.errors import UserError, abbreviate, console, say, tell
from cait.extras.datacheck.same_bytes import checked, same_bytes
from cait.extras.features import evenly
from cait.extras.frames import SAME, SIDE, told_of_frames
from cait.run.program import Program


def check(arguments: list[str], program: Program) -> None:
    """Print what is in a folder, then a line for each thing that is wrong with it."""
    options = Options("check", "Count the images of a data folder and decode some.")
    options.add_argument(
        "root", metavar="DIR", type=Path, help="with train/<class>/ and val/<class>/"
    )
    options.add_argument(
        "--images",
        type=int,
        default=2000,
        metavar="N",
        help="how many to decode, evenly over all; default 2000",
    )
    if "channels" in plugins.extras():
        options.add_argument(
            "--reader", metavar="PATH", help="as --data.reader; known where a folder holds planes"
        )
    given = options.parse_args(arguments)
    root = given.root
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist")
    if any(root.glob("ILSVRC2012_*.tar")) and not (root / "train").is_dir():
        raise UserError(
            f"{root} holds ImageNet's archives still packed: a run with this --data.root unpacks them"
        )
    checked.add(root)
    doubtful: list[str] = []
    wrong = list(_faults(open_source(str(root)), given, doubtful))
    for line in wrong:
        say(f"wrong: {line}")
    if wrong:
        raise UserError(f"{len(wrong)} thing(s) wrong with {root}")
    verdict = (
        f"can be used; look at the {len(doubtful)} thing(s) above"
        if doubtful
        else "is as it should be"
    )
    say(f"{root} {verdict}")


def _faults(source: Any, given: Any, doubtful: list[str]) -> Iterator[str]:
    """What a run would refuse, or else what is damaged or left out by mistake; `doubtful` gets what it would take."""
    if hasattr(source, "verify") and (damaged := list(source.verify())):  # as that of shards does
        yield from damaged
        return
    try:
        names, train, val = source.class_names, source.train, source.val
    except UserError as error:
        yield str(error)
        return
    print(
        f"{len(names):,} classes, {len(train):,} training and {len(val):,} validation images",
        flush=True,
    )
    if isinstance(source, FolderSource):
        if source.left_out:
            yield f"{source.root}{not_listed(source.left_out)}"
        doubtful += _told(_copies(source.table), "the same bytes")
        if frames := told_of_frames(source):
            doubtful.append(frames)
    channels = plugins.extras().get("channels")
    reading = AS_SEEN
    if channels and (given.reader or channels.holds_planes(given.root)):
        reading = channels.reading(reader=given.reader or channels.READER, in_chans=0)
    seen, unreadable = _decoded(train, val, given.images, reading)
    yield from unreadable
    doubtful += _told(_near_equal(seen), "near-equal")
    for line in doubtful:
        tell(line)


class Seen(NamedTuple):
    """An image that was decoded."""

    name: str
    label: int
    is_held_out: bool
    hash: str
    """Its perceptual hash: images that look alike have the same."""
    thumbnail: np.ndarray
    """uint8 [SIDE, SIDE, 3]"""


Alike = tuple[tuple[str, int, bool], tuple[str, int, bool]]
"""Name, label and set of two images."""


def _copies(table: Images) -> Iterator[Alike]:
    """Images of the same bytes; a bar shows how many files have been looked at."""
    images = table.in_split(TRAIN | VAL)
    with Progress(
        console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        groups = same_bytes(images, lambda indices, title: bar.track(indices, description=title))
    for same in groups:
        first, *others = [(*images[index], images.splits[index] == VAL) for index in same]
        for other in others:
            yield first, other


def _near_equal(seen: Iterable[Seen]) -> Iterator[Alike]:
    """Images of the same hash whose thumbnails hardly differ, as after another compression or a change of size."""
    alike = defaultdict[str, list[Seen]](list)
    for image in seen:
        alike[image.hash].append(image)
    for first, *others in alike.values():
        for other in others:
            if (
                first[1:3] != other[1:3]
                and np.abs(first.thumbnail.astype(int) - other.thumbnail).mean() < SAME
            ):
                yield first[:3], other[:3]


def _told(pairs: Iterable[Alike], how: str) -> Iterator[str]:
    """A line each about images that are there under two labels, in both sets, and twice in a class of one set."""
    pairs_of = defaultdict[str, list[str]](list)
    for (first, label, is_held_out), (other, other_label, other_is_held_out) in pairs:
        kind = "in one class of one set"
        if label != other_label:
            kind = "under two labels"
        elif is_held_out != other_is_held_out:
            kind = "to train on and to validate on"
        pairs_of[kind].append(f"{first} = {other}")
    for kind, names in pairs_of.items():
        yield f"{len(names):,} images are there twice ({how}), {kind}: {abbreviate(names)}"


def _decoded(train: Any, val: Any, images: int, how: Reading) -> tuple[list[Seen], list[str]]:
    """Decode `images` images, spread evenly over both sets. Returns them, and a line for each that cannot be read.

    Planes are only read; all must have the channels of the first.
    """
    import imagehash

    seen: list[Seen] = []
    unreadable: list[str] = []
    total = len(train) + len(val)
    planes = 0
    rows = evenly(total, images)
    for row in rows:
        samples, index = (train, row) if row < len(train) else (val, row - len(train))
        try:
            raw, label = samples[index]
            image = load_image(raw, samples.name(index), how)
        except UserError as error:
            unreadable.append(str(error))
            continue
        if not isinstance(image, Image.Image):
            how = replace(how, in_chans=len(image))
            planes += 1
            continue
        seen.append(
            Seen(
                samples.name(index),
                label,
                samples is val,
                str(imagehash.phash(image)),
                np.asarray(image.resize((SIDE, SIDE))),
            )
        )
    spread = "" if len(rows) == total else f" of {total:,}, spread evenly"
    failed = f", {len(unreadable):,} cannot be read" if unreadable else ""
    kind = " as planes" if planes else ""
    print(f"decoded {len(seen) + planes:,} images{kind}{spread}{failed}")
    return seen, unreadable
