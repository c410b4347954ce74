"""What `cait eval` shows of each class if an image may have several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from cait.cli.evaluate import Row, Scores, Scoring
from cait.errors import printable

MOST = 30
"""The table shows at most so many classes, those with the lowest average precision."""


class ByClass(Callback):
    """A `cait.cli.evaluate.Scorer` that adds a table to the screen, and nothing to the scores."""

    def __init__(self, scoring: Scoring) -> None:
        self.several = scoring.module.task.several
        self.scores: dict[str, Scores] = {}

    def extend(self, result: Scores) -> None:
        """Do nothing: the metrics of the task have each class."""

    def rows(self, core: Sequence[Row], result: Scores) -> Iterable[Row]:
        return ()

    def show(self, result: Scores) -> None:
        """Print average precision, F1 and threshold of each class, of the weights that predict."""
        if not self.several:
            return
        scores: Scores = result["ema"] if "ema" in result else result["raw"]
        found = scores["multi_label"]
        precision: dict[str, float | None] = found["average_precision"]
        order = sorted(precision, key=lambda name: (precision[name] is None, precision[name]))
        table = Table("class", *(f"{title}" for title in ("average precision", "F1", "threshold")))
        for name in order[:MOST]:
            figures: list[Any] = [found[what][name] for what in ("average_precision", "f1", "thresholds")]
            cells = ["" if figure is None else f"{figure:.4f}" for figure in figures]
            table.add_row(printable(name), *cells)
        Console().print(table)
