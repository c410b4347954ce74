"""Steps whose gradients are not finite: left out, counted, and the end of a run that has too many of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from cait.errors import UserError

BATCH_FILE = "nonfinite.pt"


class NonFiniteGuard(Callback):
    """Leave out the optimiser steps whose gradient has an infinity or a NaN in it.

    The norm of the whole gradient tells; after DDP has averaged it, it is the same on all processes.
    The decision stays on the device: the fused optimiser skips a step by its `found_inf`, as it does
    for the GradScaler of 16-mixed, which is left to itself. Weights, moments and the optimiser's
    step count stay as they were; schedule, moving average and step number go on.

    Args:
        folder: where the batch goes that the run ends at.
        limit: steps in a row that are left out before the run ends. They are counted on the device and looked at on
            the CPU after every step, on a GPU as often as metrics are logged.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        if limit < 1:
            raise UserError(f"max_nonfinite_steps must be at least 1, got {limit}")
        self.folder, self.limit = folder, limit
        self.in_a_row = torch.zeros(())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.precision == "16-mixed" or not optimizer.defaults.get("fused"):
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = get_total_norm(gradients)
        bad = norm.isfinite().logical_not().float()
        optimizer.found_inf = bad  # type: ignore[attr-defined]  # read by torch's fused AdamW
        self.in_a_row = (self.in_a_row.to(bad.device) + 1) * bad
        pl_module.log("train/grad_norm", norm)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        looked_at = pl_module.device.type == "cpu" or trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if looked_at and self.in_a_row >= self.limit:
            self._give_up(trainer, batch)

    def _give_up(self, trainer: Trainer, batch: tuple[Tensor, Tensor]) -> None:
        path = self.folder / BATCH_FILE
        if trainer.is_global_zero:
            images, targets = (part.cpu() for part in batch)
            torch.save({"images": images, "targets": targets, "step": trainer.global_step}, path)
        raise UserError(
            f"{int(self.in_a_row)} steps in a row gave no finite gradient and were left out; the last batch is in "
            f"{path}. Lower --model.lr, or look at the data"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": int(self.in_a_row)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row = torch.tensor(float(state_dict["in_a_row"]))
