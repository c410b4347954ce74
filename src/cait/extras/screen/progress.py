"""What the screen shows while a run trains: a progress bar on a terminal, a line for each epoch in a log."""

import math
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme

from cait.loops import next_batch

# Name on the screen and format. metrics.csv has the others.
SHOWN = {
    "train/loss": ("loss", "{:.3f}"),
    "train/acc1": ("acc1", "{:.1f}%"),
    "lr": ("lr", "{:.1e}"),
    "val/acc1": ("val/acc1", "{:.2f}%"),
    "val/acc1_macro": ("val/acc1_macro", "{:.2f}%"),
}
NOT_SHOWN = ("val/acc5", "val/loss")
MEANS = ("train/loss", "train/acc1")
"""Metrics on the bar. Their means over the epoch, the module's `figures`, are on the epoch's line; in a resumed run
over the steps of this process."""
WIDE = 105
"""On a terminal with at least this many columns the bar shows the times and the speed."""


def shown_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """The metrics of `SHOWN`, in its order, then validation metrics of your own, formatted."""
    looks = dict(SHOWN)
    for name in metrics:
        if name.startswith("val/") and name not in NOT_SHOWN:
            looks.setdefault(name, (name, "{:.4f}"))
    shown = {}
    for name, (label, form) in looks.items():
        if name in metrics:
            value = float(metrics[name])
            shown[label] = "-" if math.isnan(value) and name != "train/loss" else form.format(value)
    return shown


def epoch_label(trainer: Trainer) -> str:
    """The running epoch, counted from 1: "epoch 3/30"."""
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar on one line, with loss and accuracy in formats that show them."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_text_delimiter="  "))
        self._metrics: dict[str, str] = {}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        description, bar, batches, *times = super().configure_columns(trainer)
        bar.bar_width = 10  # so that the metrics stay on the line
        is_wide = self._console and self._console.width >= WIDE
        return [description, bar, batches, *(times if is_wide else [])]

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_label(self.trainer)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # Reading a metric waits for the device, so read only when the bar is drawn.
        done = next_batch(trainer)
        if (
            not trainer.training
            or done % self.refresh_rate == 0
            or done == trainer.num_training_batches
        ):
            known = trainer.callback_metrics
            self._metrics = shown_metrics({name: known[name] for name in MEANS if name in known})
        return self._metrics


class EpochLines(Callback):
    """One line for each epoch, in a log or above the bar of a terminal."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = self._batch_end = time.monotonic()
        self._waited_before = _waited(trainer)
        self._sums: Any = None  # of the figures, and of their batches, [2, 2]
        self._validated = False

    on_train_start = on_train_epoch_start  # Lightning leaves out the epoch's start in a run resumed within an epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batch_end = time.monotonic()
        # a training step of your own may leave it out
        figures = getattr(pl_module, "figures", None)
        if figures is not None:
            known = ~figures.isnan()
            sums = torch.stack([figures.where(known, 0), known.to(figures)])
            self._sums = sums if self._sums is None else self._sums + sums

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics.copy()
        if not self._validated:  # Lightning keeps those of an earlier epoch
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val")}
        if self._sums is not None:
            mean = trainer.strategy.reduce(self._sums[0] / self._sums[1], reduce_op="mean")
            metrics |= dict(zip(MEANS, mean, strict=True))
        if trainer.is_global_zero:
            print(self._line(trainer, shown_metrics(metrics)), flush=True)

    def _line(self, trainer: Trainer, metrics: dict[str, str]) -> str:
        cells = [epoch_label(trainer)]
        cells += [f"{name}: {value}" for name, value in metrics.items()]
        cells.append(f"{time.monotonic() - self._epoch_start:.1f} s")
        waited = _waited(trainer) - self._waited_before
        steps = self._batch_end - self._epoch_start
        share = waited / steps if steps > 0 else 0.0
        return (
            f"{'  '.join(cells)}, waited {waited:.1f} s of {steps:.1f} s for images ({share:.0%})"
        )


def _waited(trainer: Trainer) -> float:
    """Seconds that training has waited for batches so far; a loader of your own may not say."""
    return getattr(trainer.train_dataloader, "waited", 0.0)
