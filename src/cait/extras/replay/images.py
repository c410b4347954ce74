"""What `cait replay` writes of a step: sheets of its images, a table of them, and the gradients by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cait import disk, plots
from cait.data.datamodule import ImageNetDataModule
from cait.extras.replay import contact_sheet
from cait.extras.replay.batches import Batch, Seen
from cait.extras.replay.contact_sheet import Cell

PASTED, ERASED = "#56B4E9", "#E69F00"
"""Colours of the boxes: blue and orange."""
COLUMNS = (
    *("step", "epoch", "batch", "process", "place", "file", "label", "share", "mixed", "partner", "partner_label"),
    *("box", "erased", "repeat", "instead_of", "loss"),
)


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

    def _line(self, image: Seen, partner: Seen | None, loss: float | None) -> list[Any]:
        names = self.class_names
        of_partner = (partner.file, names[partner.label]) if partner else ("", "")
        boxes = [" ".join(map(str, box or ())) for box in (image.box, image.erased)]
        where = (self.step, image.epoch, image.batch, image.process, image.place, image.file, names[image.label])
        return [*where, image.share, image.mixed, *of_partner, *boxes, image.repeat, image.instead_of, loss]

    def _caption(self, image: Seen, partner: Seen | None, loss: float | None, several: bool) -> str:
        names = [_short(self.class_names[shown.label]) for shown in (image, partner) if shown]
        if partner:
            names = [f"{names[0]} ({image.share:.2f})", f"+ {names[1]} ({1 - image.share:.2f})"]
        where = f"p{image.process} b{image.batch} " if several else ""
        judged = [] if loss is None else [f"loss {loss:.3f}"]
        return "\n".join([f"{where}#{image.place} {_short(Path(image.file).name)}", *names, *judged])

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
        for number, figure in enumerate(contact_sheet.pages(self.cells, title), 1):
            written.append(stem.with_name(f"{stem.name}-{number}.png" if number > 1 else f"{stem.name}.png"))
            plots.write(figure, written[-1])
        disk.write_csv(stem.with_suffix(".csv"), COLUMNS, self.lines)
        return [*written, stem.with_suffix(".csv")]


def _short(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most // 2 - 1) :]}"
