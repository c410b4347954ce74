"""The images whose label is doubtful, on a page."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cait.data.reading import load_image
from cait.extras import page, plots
from contrib.crossval import doubt

PAGE = "doubtful.html"
"""File in the folder of a cross-validation."""
MOST = 200
"""Images on the page; its file has a few megabytes then."""
SIDE = 192
"""Pixels of a picture's longer side."""


def write(folder: Path, rows: Sequence[doubt.Row], images: int, data: Any) -> None:
    """Show the doubtful images, the most doubtful first, with their label and the class that seems right.

    Args:
        images: how many images were judged.
        data: a data module of theirs, for the place of their files and how these are read.
    """
    table = os.path.relpath(folder / doubt.DOUBTFUL)
    most = f", the {MOST} most doubtful below" if len(rows) > MOST else ""
    frequent = page.most_common(
        "label", "seems", ((label, seems) for _, label, _, seems, _ in rows)
    )
    tiles = [
        (
            _pixels(data, path),
            f"labeled {label}: {float(probability):.1%}",
            f"seems {seems}: {float(its_probability):.1%}; {path}",
        )
        for path, label, probability, seems, its_probability in rows[:MOST]
    ]
    words = page.paragraph(
        "Each image was judged by the network of the fold that had not trained on it. To correct a label, edit the "
        f"column label of the table, and train with --data.labels {table}."
    )
    sections = [("Images", words + page.tiles(tiles)), ("Classes", frequent)] if rows else []
    page.write(
        folder / PAGE,
        f"{folder.name}: doubtful labels",
        [("doubtful", f"{len(rows):,} of {images:,} labels{most}"), ("table", table)],
        sections,
    )


def _pixels(data: Any, path: str) -> np.ndarray:
    """An image as people see it, whole and small."""
    # Large files are read much faster when they shrink.
    image = load_image(data.root / path, reading=replace(data.settings, shrink=SIDE))
    if not isinstance(image, Image.Image):
        image = Image.fromarray(plots.pixels(data.settings.normalize(image), data.settings))
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)
