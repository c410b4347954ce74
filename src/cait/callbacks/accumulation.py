"""A run goes on with another number of accumulated batches at the step that it had reached."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from cait import run


class StepsOfAnotherSize(Callback):
    """Lightning counts batches: after a resume, count them in those of now.

    Checkpoints are saved after whole steps. With `--data.global_batch N` the steps of an epoch are whole, unless
    `--trainer.limit_train_batches` cuts it amid one.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = (run.data_state(checkpoint) or {}).get("accumulated"), trainer.accumulate_grad_batches
        if before is None or before == now or "loops" not in checkpoint:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            more = counts["ready"] * now // before - counts["ready"]
            counts.update({name: count + more for name, count in counts.items()})  # "completed" lags by a batch
