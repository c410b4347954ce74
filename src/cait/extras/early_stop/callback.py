from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info

from cait.errors import UserError


class EarlyStop(EarlyStopping):
    """Lightning's, with a decision that survives a kill and a patience that a resumed run may change.

    Lightning forgets the decision if the process dies between the checkpoint of the last epoch and its end, and trains
    on; and its checkpoint's patience wins over that of the command line.

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
        super().__init__(monitor, min_delta, patience, mode=mode, strict=False, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= self.wait_count >= self.patience

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.wait_count >= self.patience:
            best = f"{self.monitor} has not got better than {float(self.best_score):.4g}"
            rank_zero_info(
                f"stopped early: {best} in {self.wait_count} validations; a higher --early_stop.patience goes on"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
