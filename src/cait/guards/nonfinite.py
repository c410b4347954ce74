"""Count the steps whose gradient is not finite, and the unreadable images; end a run that has too many."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.run.rundir import NONFINITE
from cait.train.module import CaiTModule, SkipStep


class NonFiniteGuard(Callback):
    """Skip the optimizer steps whose gradient has an infinity or a NaN.

    The norm of the whole gradient shows it. DDP has averaged the gradient, so the norm is the same on all
    processes. Weights, moments and the optimizer's step count stay as they were. Schedule, moving average and
    step number go on. The step is skipped by

    - a fused optimizer, on the device, through its `found_inf`;
    - the GradScaler under 16-mixed, which halves its scale too;
    - otherwise this callback, on the host; on a GPU it waits for the device once a step.

    Args:
        folder: where to save the batch at which the run ends.
        limit: skipped steps in a row that end the run. The device counts them. The host reads the count after
            every step on the CPU, and as often as metrics are logged on a GPU.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.in_a_row = torch.zeros(())

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: CaiTModule,  # type: ignore[override]
        optimizer: Optimizer,
    ) -> None:
        norm = pl_module.grad_norm = pl_module.gradient_norm(optimizer)
        bad = norm.isfinite().logical_not().float()
        self.in_a_row = (self.in_a_row.to(bad.device) + 1) * bad
        if pl_module.is_logged():
            pl_module.log("train/grad_norm", norm)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        # fused, and no wrapper of a fused one
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = bad  # type: ignore[attr-defined]
        elif bad and pl_module.automatic_optimization:
            raise SkipStep
        elif bad:  # the user's own code steps; without gradients nothing moves
            optimizer.zero_grad()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        is_read = pl_module.device.type == "cpu" or trainer.global_step % every == 0
        if is_read and self.in_a_row >= self.limit:
            path = self.folder / NONFINITE
            if trainer.is_global_zero:
                images, targets = (tensor.cpu() for tensor in batch)
                torch.save(
                    {"images": images, "targets": targets, "step": trainer.global_step}, path
                )
            raise UserError(
                f"{int(self.in_a_row)} steps in a row gave no finite gradient and were skipped; "
                f"the last batch is in {path}. Lower --model.lr, or look at the data"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        skipped = int(self.in_a_row)
        if skipped and trainer.is_global_zero:
            print(
                f"The last {skipped} steps were left out: their gradients were not finite",
                flush=True,
            )
        for callback in trainer.early_stopping_callbacks:
            reason = callback.stopping_reason_message
            # else Lightning has said it
            if trainer.should_stop and reason and not callback.verbose:
                rank_zero_info(f"stopped early: {reason}")

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": int(self.in_a_row)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row = torch.tensor(float(state_dict["in_a_row"]))


class UnreadableReport(Callback):
    """After each epoch, count the unreadable images of all processes; too many end the run.

    The list begins anew when a run goes on: images may be readable again, as on a drive that came back.
    """

    def __init__(self, data: ImageNetDataModule) -> None:
        self.data = data
        self._reported = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = self.data.unreadable.path
        if trainer.is_global_zero and path is not None:
            path.unlink(missing_ok=True)  # other processes read no image before all are here

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        unreadable = self.data.unreadable
        count = unreadable.check()
        if count > self._reported and trainer.is_global_zero:
            self._reported = count
            print(
                f"{count} images cannot be read, others stand in for them: {unreadable.path}",
                flush=True,
            )
