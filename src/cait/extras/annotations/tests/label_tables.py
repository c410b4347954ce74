"""Tables of images: a path, and a label, a split or a group for each."""

import csv
from pathlib import Path


def below(images, root):
    return [str(Path(path).relative_to(root)) for path, _ in images]


def write_table(file, header, rows):
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([header.split(","), *rows])
    return str(file)
