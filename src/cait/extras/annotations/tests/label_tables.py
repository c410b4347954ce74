"""Tables of images: a path, and a label, a split or a group for each."""

import csv
from pathlib import Path


def names(images):
    """The paths of images, from the working folder on."""
    return [str(Path(path)) for path, _ in images]


def write_table(file, header, *columns):
    with open(file, "w", newline="", errors="surrogateescape") as lines:
        csv.writer(lines).writerows([header.split(","), *zip(*columns, strict=True)])
