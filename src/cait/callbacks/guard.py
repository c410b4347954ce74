"""Steps whose gradients are not finite: left out, counted, and the end of a run that has too many of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from cait.errors import UserError
from cait.module import CaiTModule, SkipStep
from cait.run import NONFINITE


class NonFiniteGuard(Callback):
    """Leave out the optimizer steps whose gradient has an infinity or a NaN in it.

    The norm of the whole gradient tells. After DDP has averaged the gradient, the norm is the same on all
    processes. Weights, moments and the optimizer's step count stay as they were; schedule, moving average and
    step number go on. Who leaves the step out:

    - a fused optimizer, on the device: it skips a step by its `found_inf`;
    - the GradScaler under 16-mixed, which halves its scale too;
    - else this callback, on the host, which on a GPU waits for the device once a step.

    Args:
        folder: where the batch goes that the run ends at.
        limit: steps in a row that are left out before the run ends. They are counted on the device and read on
            the CPU after every step, on a GPU as often as metrics are logged.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        if limit < 1:
            raise UserError(f"max_nonfinite_steps must be at least 1, got {limit}")
        self.folder, self.limit = folder, limit
        self.in_a_row = torch.zeros(())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: CaiTModule, optimizer: Optimizer) -> None:  # type: ignore[override]
        norm = pl_module.grad_norm = pl_module.gradient_norm(optimizer)
        bad = norm.isfinite().logical_not().float()
        self.in_a_row = (self.in_a_row.to(bad.device) + 1) * bad
        pl_module.log("train/grad_norm", norm)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = bad  # type: ignore[attr-defined]
        elif bad:
            raise SkipStep

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        looked_at = pl_module.device.type == "cpu" or trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if looked_at and self.in_a_row >= self.limit:
            self._give_up(trainer, batch)

    def _give_up(self, trainer: Trainer, batch: tuple[Tensor, Tensor]) -> None:
        path = self.folder / NONFINITE
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
