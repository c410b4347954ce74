from __future__ import annotations

from math import inf
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from cait.errors import UserError


class EarlyStop(EarlyStopping):
    """Lightning's, with a decision that survives a kill and a patience that a resumed run may change.

    Lightning forgets the decision if the process dies between the checkpoint of the last epoch and its end, and trains
    on; and its checkpoint's patience wins over that of the command line. It ends a run at the first value that is not
    finite; here such a value is one that is not better.

    Args:
        monitor: name of the metric.
        mode: "max" or "min".
        patience: validations in a row without a better metric, after which the run ends.
        min_delta: the gain that counts as better must be larger.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(self, monitor: str, mode: str, patience: int, min_delta: float = 0.0) -> None:
        if patience < 1 or min_delta < 0:
            found = f"got {patience} and {min_delta:g}"
            raise UserError(f"early_stop.patience must be at least 1 and early_stop.min_delta at least 0, {found}")
        # `BestCheckpoint` says what is wrong with a metric that is not there.
        more: dict[str, Any] = dict(strict=False, check_finite=False, check_on_train_epoch_end=False)
        super().__init__(monitor, min_delta, patience, mode=mode, **more)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= self.wait_count >= self.patience

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        finite, worst = bool(current.isfinite()), torch.full_like(current, -inf if self.mode == "max" else inf)
        stops, reason = super()._evaluate_stopping_criteria(current if finite else worst)
        if stops:
            best = f"has not got better than {float(self.best_score):.4g}"
            best = best if self.best_score.isfinite() else f"was {current:g}"
            reason = f"{self.monitor} {best} in {self.wait_count} validations; a higher --early_stop.patience goes on"
        return stops, reason

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
