"""With another number of accumulated batches, a resumed run goes on at the step that it had reached."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait import ckpt


class StepsOfAnotherSize(Callback):
    """Lightning counts batches: after a resume, convert its counts to this run's batches.

    Checkpoints are saved after whole steps. With `--data.global_batch N` an epoch has only whole steps, unless
    `--trainer.limit_train_batches` cuts it within one.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = (ckpt.data_state(checkpoint) or {}).get("accumulated"), trainer.accumulate_grad_batches
        if before is None or before == now or "loops" not in checkpoint:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            more = counts["ready"] * now // before - counts["ready"]
            counts.update({name: count + more for name, count in counts.items()})  # "completed" lags by a batch
