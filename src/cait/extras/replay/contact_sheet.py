"""Images on sheets, each with its caption and its boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cait import plots

COLUMNS, ROWS = 8, 8
WIDTH, HEIGHT = 1.5, 2.0
"""Inches of a cell with its caption."""


@dataclass
class Cell:
    """An image uint8 [S, S, 3], the lines below it, and its boxes (top, left, height, width) by their colour."""

    pixels: np.ndarray
    caption: str
    boxes: dict[str, tuple[int, int, int, int]]


def pages(cells: Sequence[Cell], title: str) -> Iterator[Figure]:
    """Figures of at most COLUMNS × ROWS cells; above each stand `title` and which images it shows."""
    for first in range(0, len(cells), COLUMNS * ROWS):
        yield _page(cells[first : first + COLUMNS * ROWS], title)


def _page(cells: Sequence[Cell], title: str) -> Figure:
    columns = min(COLUMNS, math.ceil(math.sqrt(len(cells))))
    rows = math.ceil(len(cells) / columns)
    figure, axes = plots.grid(rows, columns, max(WIDTH * columns, 6.5), HEIGHT * rows + 0.6)
    figure.suptitle(title, fontsize=9)
    for place in axes.flat:
        place.axis("off")
    for place, cell in zip(axes.flat, cells, strict=False):
        place.imshow(cell.pixels, interpolation="auto")
        place.set_title(cell.caption, fontsize=6, y=0, pad=-3, va="top", linespacing=1.25, parse_math=False)
        for colour, (top, left, height, width) in cell.boxes.items():
            place.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, fill=False, color=colour, linewidth=1.2))
    return figure
