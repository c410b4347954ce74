"""What `cait eval` shows of each class if an image may have several."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from rich.table import Table

from cait.cli.evaluate import Scorer, Scores
from cait.errors import console
from cait.extras.scores import SEVERAL, of_several


class ByClass(Scorer, Callback):
    """It adds a table to the screen, and nothing to the scores: the metrics of the task have each class."""

    def show(self, result: Scores) -> None:
        """Print average precision, F1 and threshold of each class, of the weights that predict."""
        weights: Scores = result["ema"] if "ema" in result else result["raw"]
        if "multi_label" in weights:
            table = Table("class", *SEVERAL.values())
            for row in sorted(of_several(weights["multi_label"]), key=lambda row: row[1]):
                table.add_row(*row)
            console().print(table)
