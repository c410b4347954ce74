"""The images of a step: contact sheets of them, each with its caption and its boxes, and a table of all."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cait import disk
from cait.data.transforms import Preprocessing
from cait.extras import plots
from contrib.replay.training_batches import Batch, Box, SeenImage

COLUMNS = 8
ROWS = 8
"""Cells of a sheet."""
WIDTH = 1.5
HEIGHT = 2.0
"""Inches of a cell with its caption."""
PASTED = "#56B4E9"
"""Blue, the color of the box that CutMix pasted."""
ERASED = "#E69F00"
"""Orange, the color of the box that was erased."""
FIELDS = (
    "step",
    "epoch",
    "batch",
    "process",
    "place",
    "file",
    "label",
    "share",
    "mixed",
    "partner",
    "partner_label",
    "box",
    "erased",
    "repeat",
    "instead_of",
    "loss",
)
"""Columns of the table."""
POSITION = attrgetter("epoch", "batch", "process", "place", "file", "class_name", "share", "mixed")
"""The first of them that an image has by itself."""


@dataclass
class Cell:
    """An image uint8 [S, S, 3], the lines below it, and its boxes by their color."""

    pixels: np.ndarray
    caption: str
    boxes: dict[str, Box]


def pages(cells: Sequence[Cell], title: str) -> Iterator[Figure]:
    """Figures of at most COLUMNS × ROWS cells; `title` stands above each."""
    for first in range(0, len(cells), COLUMNS * ROWS):
        shown = cells[first : first + COLUMNS * ROWS]
        columns = min(COLUMNS, math.ceil(math.sqrt(len(shown))))
        rows = math.ceil(len(shown) / columns)
        figure, axes = plots.grid(rows, columns, max(WIDTH * columns, 6.5), HEIGHT * rows + 0.6)
        figure.suptitle(title, fontsize=9)
        for panel in axes.flat:
            panel.axis("off")
        for panel, cell in zip(axes.flat, shown, strict=False):
            panel.imshow(cell.pixels, interpolation="auto")
            panel.set_title(
                cell.caption, fontsize=6, y=0, pad=-3, va="top", linespacing=1.25, parse_math=False
            )
            for color, (top, left, height, width) in cell.boxes.items():
                panel.add_patch(
                    Rectangle(
                        (left - 0.5, top - 0.5),
                        width,
                        height,
                        fill=False,
                        color=color,
                        linewidth=1.2,
                    )
                )
        yield figure


def write(
    stem: Path,
    step: int,
    batches: Iterable[tuple[Batch, Sequence[float] | None]],
    several: bool,
    most: int,
    preprocessing: Preprocessing,
) -> list[Path]:
    """Draw the images of a step in `stem`.png, `stem`-2.png, ..., and list them in `stem`.csv; returns these files.

    Args:
        batches: of the step, each with the loss of its images, if known.
        several: whether there are several batches.
        most: images to draw at most; all are listed.
    """
    cells: list[Cell] = []
    lines = []
    for batch, losses in batches:
        for place, image in enumerate(batch.seen):
            partner = None if image.partner is None else batch.seen[image.partner]
            loss = losses[place] if losses else None
            lines.append([step, *_line(image, partner), loss])
            if len(cells) < most:
                boxes = {
                    color: box
                    for color, box in ((PASTED, image.box), (ERASED, image.erased))
                    if box
                }
                pixels = plots.pixels(batch.images[place], preprocessing)
                cells.append(Cell(pixels, _caption(image, partner, loss, several), boxes))
    first = lines[0][FIELDS.index("batch")]
    which = f"batch {first}" if first == image.batch else f"batches {first} to {image.batch}"
    title = f"step {step}: epoch {image.epoch}, {which}, {len(lines):,} images"
    if len(cells) < len(lines):
        title += f", the first {len(cells):,}"
    if any(cell.boxes for cell in cells):
        title += " (blue: pasted by CutMix, orange: erased)"
    for stale in stem.parent.glob(f"{stem.name}-*.png"):  # of a replay that drew more
        stale.unlink()
    written = []
    for number, figure in enumerate(pages(cells, title), 1):
        ending = f"-{number}" if number > 1 else ""
        path = stem.with_name(f"{stem.name}{ending}.png")
        plots.write(figure, path)
        written.append(path)
    table = stem.with_suffix(".csv")
    disk.write_csv(table, FIELDS, lines)
    return [*written, table]


def _line(image: SeenImage, partner: SeenImage | None) -> list[Any]:
    boxes = [" ".join(map(str, box or ())) for box in (image.box, image.erased)]
    partners = [partner.file, partner.class_name] if partner else ["", ""]
    return [*POSITION(image), *partners, *boxes, image.repeat, image.instead_of]


def _caption(image: SeenImage, partner: SeenImage | None, loss: float | None, several: bool) -> str:
    labels = [_short(image.class_name)]
    if partner:
        labels = [
            f"{labels[0]} ({image.share:.2f})",
            f"+ {_short(partner.class_name)} ({1 - image.share:.2f})",
        ]
    if loss is not None:
        labels.append(f"loss {loss:.3f}")
    position = f"p{image.process} b{image.batch} " if several else ""
    return "\n".join([f"{position}#{image.place} {_short(Path(image.file).name)}", *labels])


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:10]}…{name[-9:]}"
