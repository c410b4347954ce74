"""What `cait eval` shows of each class if an image may have several."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from rich.table import Table

from cait.cli.evaluate import Scorer, Scores
from cait.errors import console
from cait.extras import scores

MOST = 30
"""The table shows at most so many classes, those with the lowest average precision."""


class ByClass(Scorer, Callback):
    """It adds a table to the screen, and nothing to the scores: the metrics of the task have each class."""

    def show(self, result: Scores) -> None:
        """Print average precision, F1 and threshold of each class, of the weights that predict."""
        weights: Scores = result["ema"] if "ema" in result else result["raw"]
        if "multi_label" not in weights:
            return
        found = weights["multi_label"]
        precision: dict[str, float | None] = found["average_precision"]
        rows = sorted(scores.of_several(found), key=lambda row: (precision[row[0]] is None, precision[row[0]]))
        table = Table("class", *scores.SEVERAL.values())
        for name, *figures in rows[:MOST]:
            table.add_row(name, *figures)
        console().print(table)
