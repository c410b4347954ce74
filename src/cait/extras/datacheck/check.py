"""Check a data folder before a run: count it, compare it with ImageNet's numbers, decode a sample."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchvision.datasets.imagenet import ARCHIVE_META

from cait.data.folder import MACOS, abbreviate
from cait.data.listing import is_image
from cait.data.reading import load_rgb
from cait.data.source import open_source
from cait.errors import UserError

ARCHIVES = {part: name for part, (name, _) in ARCHIVE_META.items()}
"""File names of ImageNet's archives "train", "val" and "devkit"."""
IMAGENET_CLASSES = 1000
IMAGENET_IMAGES = {"train": 1_281_167, "val": 50_000}
"""ILSVRC2012 as published."""

Classes = dict[str, list[str]]
"""Paths of the images by class."""


def check(root: Path, images: int = 2000) -> None:
    """Print what is in `root`, then a line for each thing that is wrong with it.

    Args:
        root: folder with train/<class>/ and val/<class>/, or only with class folders; or a folder whose data source has
            a method `verify`, as that of shards has.
        images: how many to decode, spread evenly over the classes.

    Raises:
        UserError: there is no such folder, or something is wrong with it.
    """
    if not root.is_dir():
        raise UserError(f"the data folder {root} does not exist")
    source: Any = open_source(str(root))
    wrong = list(_check_source(source, images) if hasattr(source, "verify") else _check_folders(root, images))
    for line in wrong:
        print(f"wrong: {line}")
    if wrong:
        raise UserError(f"{len(wrong)} thing(s) wrong with {root}")
    print(f"{root} is as it should be")


def _check_source(source: Any, images: int) -> Iterator[str]:
    """Let a source verify its files. If they are sound, decode a sample of its images."""
    wrong = list(source.verify())
    yield from wrong
    if wrong:
        return
    print(
        f"{len(source.class_names):,} classes, {len(source.train):,} training and {len(source.val):,} validation images"
    )
    total, decoded = len(source.train) + len(source.val), 0
    for samples in (source.train, source.val):
        share = min(len(samples), -(-images * len(samples) // total))
        decoded += share
        for i in range(share):
            index = (2 * i + 1) * len(samples) // (2 * share)
            try:
                load_rgb(samples[index][0], samples.name(index))
            except UserError as error:
                yield str(error)
    print(f"decoded {decoded:,} images, spread evenly over the sets")


def _check_folders(root: Path, images: int) -> Iterator[str]:
    split = any((root / part).is_dir() for part in IMAGENET_IMAGES)
    archives = [name for name in ARCHIVES.values() if (root / name).is_file()]
    if archives and not all((root / part).is_dir() for part in IMAGENET_IMAGES):
        advice = "the first run with this --data.root unpacks them"
        if missing := set(ARCHIVES.values()) - set(archives):
            advice = f"to have them unpacked put {' and '.join(sorted(missing))} there too"
        yield f"{root} holds {' and '.join(archives)} still packed: {advice}"
        if not split:
            return
    found: dict[str, Classes] = {}
    for part in IMAGENET_IMAGES if split else ("",):
        folder = root / part
        if not folder.is_dir():
            yield f"{folder} does not exist"
            continue
        classes = found[part or "all"] = {}
        yield from _count(folder, classes)
        count = sum(map(len, classes.values()))
        print(f"{folder}: {len(classes):,} classes, {count:,} images", flush=True)
    if len(found) == 2:
        train, val = found.values()
        for part, classes, others in (("train", train, val), ("val", val, train)):
            only = sorted(classes.keys() - others.keys())
            if only and others:  # an empty folder is reported already
                yield f"{len(only):,} class(es) only in {root / part}: {abbreviate(only)}"
    yield from _compare_with_imagenet(root, found)
    yield from _decode(found, images)


def _count(folder: Path, classes: Classes) -> Iterator[str]:
    """Fill `classes`, and yield what is wrong with the folder itself."""
    loose, strange = [], []
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or entry.name == MACOS:
            continue
        if not entry.is_dir():
            loose.append(entry.name)
            continue
        files = list(_files(entry.path))
        classes[entry.name] = sorted(file for file in files if is_image(file))
        strange += [file for file in files if not is_image(file)]
    flat = sorted(name for name in loose if is_image(name))
    if flat and not classes:
        yield (
            f"{folder} holds {len(flat):,} images and no class folders, so their classes are not known; for ImageNet "
            f"remove it and put {ARCHIVES['val']} and {ARCHIVES['devkit']} into {folder.parent}: a run sorts them"
        )
    elif flat:
        yield f"{len(flat):,} image(s) in {folder} itself, in no class folder: {abbreviate(flat)}"
    elif not classes:
        yield f"{folder} holds no class folders"
    if packed := sorted(name for name in loose if name.endswith(".tar")):
        yield f"{folder} holds {len(packed):,} archives: {abbreviate(packed)}; unpack each into a folder of its name"
    if empty := sorted(name for name, files in classes.items() if not files):
        yield f"{len(empty):,} class(es) without images in {folder}: {abbreviate(empty)}"
    if strange:
        few = abbreviate(sorted(strange))
        yield f"{len(strange):,} file(s) without an image's extension, which are left out: {few}"


def _files(folder: str) -> Iterator[str]:
    """Every file below a folder except hidden ones. The system lists kinds with names, so no file is opened."""
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path


def _compare_with_imagenet(root: Path, found: dict[str, Classes]) -> Iterator[str]:
    names = set().union(*found.values())
    if not names or not all(re.fullmatch(r"n\d{8}", name) for name in names):
        return
    right = ", ".join(f"{count:,} in {part}" for part, count in IMAGENET_IMAGES.items())
    print(f"ImageNet's numbers: {IMAGENET_CLASSES:,} classes, images: {right}")
    if len(names) != IMAGENET_CLASSES:
        print(f"the folders are named like ImageNet's, but are {len(names):,}: a part of it, or another set")
        return
    for part, classes in found.items():
        count = sum(map(len, classes.values()))
        if classes and part in IMAGENET_IMAGES and count != IMAGENET_IMAGES[part]:
            yield f"{root / part} holds {count:,} images, ImageNet {IMAGENET_IMAGES[part]:,}"


def _decode(found: dict[str, Classes], images: int) -> Iterator[str]:
    sets = [files for classes in found.values() for _, files in sorted(classes.items()) if files]
    decoded = 0
    for place, files in enumerate(sets):
        # Each class gets its share, the remainder is spread evenly, and the files of a class are sampled evenly.
        share = min((place + 1) * images // len(sets) - place * images // len(sets), len(files))
        for i in range(share):
            file = files[(2 * i + 1) * len(files) // (2 * share)]
            decoded += 1
            try:
                load_rgb(file)
            except UserError as error:
                yield str(error)
    print(f"decoded {decoded:,} images, spread evenly over the classes")
