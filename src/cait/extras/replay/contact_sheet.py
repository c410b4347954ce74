"""The images of a step: contact sheets of them, each with its caption and its boxes, and a table of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cait import disk
from cait.data.datamodule import ImageNetDataModule
from cait.extras import plots
from cait.extras.replay.training_batches import Batch, SeenImage

COLUMNS, ROWS = 8, 8
"""Cells of a sheet."""
WIDTH, HEIGHT = 1.5, 2.0
"""Inches of a cell with its caption."""
PASTED, ERASED = "#56B4E9", "#E69F00"
"""Colours of the boxes: blue and orange."""
FIELDS = (
    *("step", "epoch", "batch", "process", "place", "file", "label", "share", "mixed", "partner", "partner_label"),
    *("box", "erased", "repeat", "instead_of", "loss"),
)
"""Columns of the table."""


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
    for panel in axes.flat:
        panel.axis("off")
    for panel, cell in zip(axes.flat, cells, strict=False):
        panel.imshow(cell.pixels, interpolation="auto")
        panel.set_title(cell.caption, fontsize=6, y=0, pad=-3, va="top", linespacing=1.25, parse_math=False)
        for colour, (top, left, height, width) in cell.boxes.items():
            panel.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, fill=False, color=colour, linewidth=1.2))
    return figure


class StepImages:
    """The images of a step, drawn and listed.

    Args:
        step: its number.
        most: images to draw at most; all are listed.
        data: knows the classes and how the images were normalised.
    """

    def __init__(self, step: int, most: int, data: ImageNetDataModule) -> None:
        self.step, self.most, self.class_names = step, most, data.class_names
        self.preprocessing = data.preprocessing
        self.cells: list[Cell] = []
        self.lines: list[list[Any]] = []
        self.batches: set[tuple[int, int]] = set()

    def add(self, batch: Batch, losses: Sequence[float] | None, several: bool) -> None:
        """Add a batch with the loss of each image, if known; `several` says that there are more batches."""
        self.batches.add((batch.seen[0].epoch, batch.seen[0].batch))
        for place, image in enumerate(batch.seen):
            partner = None if image.partner is None else batch.seen[image.partner]
            loss = losses[place] if losses else None
            self.lines.append(self._line(image, partner, loss))
            if len(self.cells) < self.most:
                shown = self.preprocessing.denormalized(batch.images[place])
                boxes = {PASTED: image.box, ERASED: image.erased}
                caption = self._caption(image, partner, loss, several)
                self.cells.append(Cell(shown, caption, {key: box for key, box in boxes.items() if box}))

    def _line(self, image: SeenImage, partner: SeenImage | None, loss: float | None) -> list[Any]:
        names = self.class_names
        of_partner = (partner.file, names[partner.label]) if partner else ("", "")
        boxes = [" ".join(map(str, box or ())) for box in (image.box, image.erased)]
        position = (self.step, image.epoch, image.batch, image.process, image.place, image.file, names[image.label])
        return [*position, image.share, image.mixed, *of_partner, *boxes, image.repeat, image.instead_of, loss]

    def _caption(self, image: SeenImage, partner: SeenImage | None, loss: float | None, several: bool) -> str:
        names = [_short(self.class_names[shown.label]) for shown in (image, partner) if shown]
        if partner:
            names = [f"{names[0]} ({image.share:.2f})", f"+ {names[1]} ({1 - image.share:.2f})"]
        position = f"p{image.process} b{image.batch} " if several else ""
        losses = [] if loss is None else [f"loss {loss:.3f}"]
        return "\n".join([f"{position}#{image.place} {_short(Path(image.file).name)}", *names, *losses])

    def write(self, stem: Path) -> list[Path]:
        """Write `stem`.png, `stem`-2.png, ... and `stem`.csv; return their paths."""
        for old in stem.parent.glob(f"{stem.name}-*.png"):
            old.unlink()
        epochs, batches = zip(*sorted(self.batches), strict=True)
        which = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
        title = f"step {self.step}: epoch {epochs[0]}, {which}, {len(self.lines):,} images"
        if len(self.cells) < len(self.lines):
            title += f", the first {len(self.cells):,}"
        if any(cell.boxes for cell in self.cells):
            title += " (blue: pasted by CutMix, orange: erased)"
        written = []
        for number, figure in enumerate(pages(self.cells, title), 1):
            written.append(stem.with_name(f"{stem.name}-{number}.png" if number > 1 else f"{stem.name}.png"))
            plots.write(figure, written[-1])
        disk.write_csv(stem.with_suffix(".csv"), FIELDS, self.lines)
        return [*written, stem.with_suffix(".csv")]


def _short(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2 - 1) :]}"
