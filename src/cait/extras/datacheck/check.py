"""`cait imagenet-check`: count a data folder, compare it with ImageNet, decode a sample, and say what is wrong."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchvision.datasets.imagenet import ARCHIVE_META

from cait import disk
from cait.cli.options import Options
from cait.data.folder import FolderSource, Splits, abbreviate, class_folders, not_listed
from cait.data.listing import BESIDE, BROKEN, OTHER, Files, list_images
from cait.data.reading import load_rgb
from cait.data.source import open_source
from cait.errors import UserError
from cait.file_lock import tell
from cait.run.program import Program

ARCHIVES = [name for name, _ in ARCHIVE_META.values()]
"""File names of ImageNet's archives."""
IMAGENET_IMAGES = {"train": 1_281_167, "val": 50_000}
"""ILSVRC2012 as published."""

Classes = dict[str, list[str]]
"""Paths of the images by class."""


def imagenet_check(arguments: list[str], program: Program) -> None:
    """Print what is in a folder, then a line for each thing that is wrong with it."""
    options = Options("imagenet-check", "Count the images of a data folder and decode some.")
    options.add_argument("root", metavar="DIR", type=Path, help="with train/<class>/ and val/<class>/")
    many = "how many to decode, over all classes; default 2000"
    options.add_argument("--images", type=int, default=2000, metavar="N", help=many)
    given = options.parse_args(arguments)
    root = given.root
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist")
    source: Any = open_source(str(root))
    check = _check_source(source, given.images) if hasattr(source, "verify") else _check_folders(root, given.images)
    wrong = list(check)
    for line in wrong:
        print(f"wrong: {line}")
    if wrong:
        raise UserError(f"{len(wrong)} thing(s) wrong with {root}")
    print(f"{root} is as it should be")


def _check_source(source: Any, images: int) -> Iterator[str]:
    """Let a source verify its files, as that of shards does. If they are sound, decode a sample of its images."""
    wrong = list(source.verify())
    yield from wrong
    if wrong:
        return
    train, val = source.train, source.val
    print(f"{len(source.class_names):,} classes, {len(train):,} training and {len(val):,} validation images")

    def read(place: int) -> None:
        samples, index = (train, place) if place < len(train) else (val, place - len(train))
        load_rgb(samples[index][0], samples.name(index))

    yield from _decode([range(len(train) + len(val))], images, read)


def _check_folders(root: Path, images: int) -> Iterator[str]:
    """What is wrong with class folders, each kind of mistake in a line, and else whatever a run would refuse."""
    parts = [part for part in IMAGENET_IMAGES if (root / part).is_dir()]
    archives = [name for name in ARCHIVES if (root / name).is_file()]
    if archives and len(parts) < len(IMAGENET_IMAGES):
        yield (
            f"{root} holds {' and '.join(archives)} still packed: a run with this --data.root unpacks them, "
            f"if all are there: {', '.join(ARCHIVES)}"
        )
        return
    source = FolderSource(Splits(str(root)))
    found: dict[str, Classes] = {}
    wrong = list(_listed(source, found))
    try:
        for line in _copies(*source.sets) if not wrong else ():
            tell(line)
    except UserError as error:  # what a run would refuse
        wrong.append(str(error))
    yield from wrong
    for part, classes in found.items():
        yield from _compare_with_imagenet(part, classes)
    classes_of_all = [files for part in found.values() for _, files in sorted(part.items()) if files]
    yield from _decode(classes_of_all, images, load_rgb)


def _listed(source: FolderSource, found: dict[str, Classes]) -> Iterator[str]:
    """Fill `found` by the folders' names, and yield what is wrong with each and between them."""
    try:
        train, val = source.split_folders()
        for folder in (train, val) if val else (train,):
            classes: Classes = {}
            found[str(folder)] = classes
            yield from _count(folder, classes)
            print(f"{folder}: {len(classes):,} classes, {sum(map(len, classes.values())):,} images", flush=True)
    except UserError as error:
        yield str(error)
        return
    for part, other in ((train, val), (val, train)) if val else ():
        only = sorted(found[str(part)].keys() - found[str(other)].keys())
        if only and found[str(other)]:  # an empty folder is reported already
            yield f"{len(only):,} class(es) only in {part}: {abbreviate(only)}"


def _copies(train: Files, val: Files) -> Iterator[str]:
    """A line about images of the same bytes under two labels, and one about those in both sets."""
    alike: dict[tuple[int, bytes], list[tuple[str, int, bool]]] = {}
    for samples in (train, val):
        for path, label in samples:
            with suppress(OSError, UserError), disk.open_file(path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size // 2)  # files that are not compressed often begin alike
                alike.setdefault((size, file.read(4096)), []).append((path, label, samples is val))
    labels: list[str] = []
    sets: list[str] = []
    for (first, label, held), *others in alike.values():
        for path, other, is_held in others:
            if (other, is_held) != (label, held) and filecmp.cmp(first, path, shallow=False):
                (sets if other == label else labels).append(f"{first} = {path}")
    for kind, pairs in (("under two labels", labels), ("to train on and to validate on", sets)):
        if pairs:
            yield f"{len(pairs):,} images are there twice, {kind}: {abbreviate(pairs)}"


def _count(folder: Path, classes: Classes) -> Iterator[str]:
    """Fill `classes` as a run lists them, and yield what is wrong with the folder itself."""
    places = class_folders(folder)
    files = list_images(folder, [*places.values()])
    classes.update({name: [] for name in places})
    names = [*places]
    for path, label in files:
        classes[names[label]].append(path)
    left_out = {why: [str(folder / path) for path in paths] for why, paths in files.left_out.items()}
    flat = left_out.pop(BESIDE, [])
    if flat and not classes:
        yield f"{folder} holds {len(flat):,} images and no class folders, so their classes are not known"
    elif flat:
        yield f"{len(flat):,} image(s) in {folder} itself, in no class folder: {abbreviate(flat)}"
    elif not classes:
        yield f"{folder} holds no class folders"
    if empty := [name for name, members in classes.items() if not members]:
        yield f"{len(empty):,} class(es) without images in {folder}: {abbreviate(empty)}"
    if strange := left_out.pop(OTHER, []):
        yield f"{len(strange):,} file(s) without an image's extension, which are left out: {abbreviate(strange)}"
    if broken := left_out.pop(BROKEN, []):
        yield f"{len(broken):,} link(s) to what is not there: {abbreviate(broken)}"
    if left_out:
        tell(f"{folder}{not_listed(left_out)}")


def _compare_with_imagenet(folder: str, classes: Classes) -> Iterator[str]:
    if len(classes) != 1000 or not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return
    count, published = sum(map(len, classes.values())), IMAGENET_IMAGES.get(Path(folder).name)
    if published not in (count, None):
        yield f"{folder} holds {count:,} images, ImageNet {published:,}"


def _decode(sets: Sequence[Sequence[Any]], images: int, read: Callable[[Any], object]) -> Iterator[str]:
    """Read so many images. Each set gets its share, and the images of a set are sampled evenly."""
    decoded = 0
    for place, members in enumerate(sets):
        share = min((place + 1) * images // len(sets) - place * images // len(sets), len(members))
        for i in range(share):
            try:
                read(members[(2 * i + 1) * len(members) // (2 * share)])
            except UserError as error:
                yield str(error)
        decoded += share
    print(f"decoded {decoded:,} images, spread evenly")
