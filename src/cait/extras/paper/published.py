"""What `cait eval` shows beside the scores of one of the paper's networks."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from cait.cli.evaluate import Scorer, Scores, Scoring
from cait.extras.paper.rows import row_of


class Published(Scorer, Callback):
    """It adds the accuracies that the paper and timm publish of the network."""

    def __init__(self, scoring: Scoring) -> None:
        self.row = row_of(scoring.module.hparams, scoring.config)

    def extend(self, result: Scores) -> None:
        result["paper_row"] = self.row.id if self.row else None
        result["published"] = self.row.published if self.row else {}
