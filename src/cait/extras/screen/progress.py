"""What the screen shows while a run trains: a progress bar on a terminal, a line for each epoch in a log."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from cait.extras.clock import Clock, countdown

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
"""Metrics whose mean over the epoch is on the epoch's line: the module's `figures`."""
WIDE = 115
"""On a terminal with at least this many columns the bar is long and shows the speed."""
WIDE_BAR, NARROW_BAR = 20, 6
SPEED = len("123.45it/s")


def shown_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """The metrics of `SHOWN`, in its order, then validation metrics of your own, formatted."""
    added = {name: (name, "{:.4f}") for name in metrics if name.startswith("val/") and name not in (*SHOWN, *NOT_SHOWN)}
    return {
        label: form.format(float(metrics[name])) for name, (label, form) in (SHOWN | added).items() if name in metrics
    }


def of_this_epoch(trainer: Trainer, clock: Clock | None) -> dict[str, Any]:
    """The logged metrics; those of a validation only if this epoch has had one, because Lightning keeps older ones."""
    older = clock is not None and not clock.validated
    return {name: value for name, value in trainer.callback_metrics.items() if not (older and name.startswith("val"))}


def fitting(metrics: dict[str, str], room: int) -> dict[str, str]:
    """The metrics that fit on a line, in their order. The learning rate is dropped first, then metrics of your own."""
    last = ["lr", "acc1", "loss", "val/acc1"]
    kept = metrics.copy()
    for name in ["lr", *(name for name in reversed(metrics) if name not in last), *last[1:]]:
        if len("  ".join(f"{name}: {value}" for name, value in kept.items())) <= room:
            break
        kept.pop(name, None)
    return kept


def epoch_label(trainer: Trainer) -> str:
    """The running epoch, counted from 1: "epoch 3/30"."""
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar on one line: loss and accuracy in formats that show them, and the time left of the run.

    Without a `Clock` among the callbacks it shows no time.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_text_delimiter="  "))
        self.left = ""
        self._metrics: dict[str, str] = {}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        # Fewer and narrower columns than Lightning's, so that the metrics stay on the line.
        description, bar, batches, _, speed = super().configure_columns(trainer)
        bar.bar_width = WIDE_BAR if self._is_wide() else NARROW_BAR
        return [description, bar, batches, TimeLeftColumn(self), *([speed] if self._is_wide() else [])]

    def _is_wide(self) -> bool:
        return self._console is not None and self._console.width >= WIDE

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_label(self.trainer)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # Reading a metric waits for the device, so read only when the bar is drawn.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not trainer.training or done % self.refresh_rate == 0 or done == trainer.num_training_batches:
            clock = Clock.of(trainer)
            seconds = clock.left(trainer) if clock else None
            self.left = "" if seconds is None else f"{countdown(seconds)} left"
            self._metrics = fitting(shown_metrics(of_this_epoch(trainer, clock)), self._room(trainer))
        return self._metrics

    def _room(self, trainer: Trainer) -> int:
        """Characters that the other columns leave to the metrics."""
        batches = len(f"{trainer.num_training_batches}/{trainer.num_training_batches}")
        label = max(len(epoch_label(trainer)), len(self.validation_description))
        others = [label, batches, len(self.left), *((WIDE_BAR, SPEED) if self._is_wide() else (NARROW_BAR,))]
        return (self._console.width if self._console else 80) - sum(others) - len(others)


class TimeLeftColumn(ProgressColumn):
    """The time until the end of the run, beside the bar of training."""

    max_refresh = 1.0

    def __init__(self, bar: RunProgressBar) -> None:
        super().__init__(Column(no_wrap=True))
        self.bar = bar

    def render(self, task: Task) -> Text:
        return Text(self.bar.left if task.id == self.bar.train_progress_bar_id else "", style="dim")


class EpochLines(Callback):
    """One line for each epoch, in a log or above the bar of a terminal.

    Args:
        clock: comes before this one among the callbacks.
        width: most characters on a line, which leaves out less important parts; None is no limit.
    """

    def __init__(self, clock: Clock, width: int | None = None) -> None:
        self.clock, self.width = clock, width
        self._batches, self._sum = 0, torch.zeros(len(MEANS))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches, self._sum = 0, torch.zeros_like(self._sum)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        figures = getattr(pl_module, "figures", None)  # a training step of your own may leave it out
        if figures is not None:
            self._batches, self._sum = self._batches + 1, self._sum.to(figures) + figures

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches, "sum": self._sum.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, self._sum = state_dict["batches"], torch.tensor(state_dict["sum"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = of_this_epoch(trainer, self.clock)
        if self._batches:
            mean = self._sum.to(pl_module.device) / self._batches  # a checkpoint's sum is on the host
            mean = trainer.strategy.reduce(mean, reduce_op="mean")
            means |= dict(zip(MEANS, mean, strict=True))
        if trainer.is_global_zero:
            print(self._line(trainer, shown_metrics(means)), flush=True)

    def _line(self, trainer: Trainer, metrics: dict[str, str]) -> str:
        label, seconds = epoch_label(trainer), f"{self.clock.epoch:.1f} s"
        if self.width is not None:
            metrics = fitting(metrics, self.width - len(label) - len(seconds) - 4)
        line = "  ".join([label, *(f"{name}: {value}" for name, value in metrics.items()), seconds])
        waited, steps = self.clock.waiting(trainer)
        share = waited / steps if steps > 0 else 0.0
        wait = f", waited {waited:.1f} s of {steps:.1f} s for images ({share:.0%})"
        return line + wait if self.width is None or len(line + wait) <= self.width else line
