"""What a run shows: a progress bar on a terminal, a line for each epoch in a log, and a summary at the end."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console
from rich.panel import Panel
from rich.progress import ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from cait import plugins
from cait.plugins import Run
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint
from cait.run.data_wait import DataWait

# Name on the screen and format. metrics.csv has the others.
SHOWN = {
    "train/loss": ("loss", "{:.3f}"),
    "train/acc1": ("acc1", "{:.1f}%"),
    "lr": ("lr", "{:.1e}"),
    "val/acc1": ("val/acc1", "{:.2f}%"),
    "val/acc1_macro": ("classes' mean", "{:.2f}%"),
}


MEANS = ("train/loss", "train/acc1")
"""Metrics whose mean over the epoch is on the epoch's line: the module's `figures`."""
NOT_SHOWN = ("val/acc5", "val/loss")
NAMES = 5
"""Classes that the summary names."""
WIDE = 115
"""On a terminal with at least this many columns the bar is long and shows the speed."""
WIDE_BAR, NARROW_BAR = 20, 6
SPEED = len("123.45it/s")


def shown_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """The metrics of `SHOWN`, in its order, then validation metrics of your own, formatted."""
    own = {name: (name, "{:.4f}") for name in metrics if name.startswith("val/") and name not in (*SHOWN, *NOT_SHOWN)}
    return {
        label: form.format(float(metrics[name])) for name, (label, form) in (SHOWN | own).items() if name in metrics
    }


def epoch_label(trainer: Trainer) -> str:
    """The running epoch, counted from 1: "epoch 3/30"."""
    total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


class TimeLeft(Callback):
    """How long the run will still take, with its validations, estimated from the pace of this process's steps."""

    def __init__(self) -> None:
        self._batches, self._training, self._validation = 0, 0.0, 0.0
        self._mark: float | None = None
        self._total = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total = int(trainer.estimated_stepping_batches)

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.monotonic()
        if self._mark is not None:  # the first step of a process and one after a validation are not typical
            self._training += now - self._mark
            self._batches += 1
        self._mark = now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validation = time.monotonic() - self._begin
        self._mark = None

    def seconds(self, trainer: Trainer) -> float | None:
        """Seconds until the end; None before two steps are done."""
        if not self._batches:
            return None
        batches = (self._total - trainer.global_step) * trainer.accumulate_grad_batches
        return batches * self._training / self._batches + self._validation * self._validations(trainer, batches)

    @staticmethod
    def _validations(trainer: Trainer, batches: int) -> int:
        """How many validations come in so many batches."""
        every: Any = trainer.val_check_batch
        if not trainer.enable_validation or not math.isfinite(every):
            return 0
        epochs = trainer.check_val_every_n_epoch or 1 if every >= trainer.num_training_batches else 1
        return math.ceil(batches / (every * epochs))


class LeftColumn(ProgressColumn):
    """The time until the end of the run, beside the bar of training."""

    max_refresh = 1.0

    def __init__(self, bar: RunProgressBar) -> None:
        super().__init__(Column(no_wrap=True))
        self.bar = bar

    def render(self, task: Task) -> Text:
        return Text(self.bar.left if task.id == self.bar.train_progress_bar_id else "", style="dim")


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar on one line: loss and accuracy in formats that show them, and the time left of the run.

    Args:
        time_left: comes before this one among the callbacks; None shows no time.
    """

    def __init__(self, time_left: TimeLeft | None = None) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_text_delimiter="  "))
        self.time_left, self.left = time_left, ""
        self._metrics: dict[str, str] = {}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        # Fewer and narrower columns than Lightning's, so that the metrics stay on the line.
        description, bar, batches, _, speed = super().configure_columns(trainer)
        bar.bar_width = WIDE_BAR if self._is_wide() else NARROW_BAR
        return [description, bar, batches, LeftColumn(self), *([speed] if self._is_wide() else [])]

    def _is_wide(self) -> bool:
        return self._console is not None and self._console.width >= WIDE

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_label(self.trainer)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # Reading a metric waits for the device, so read only when the bar is drawn.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not trainer.training or done % self.refresh_rate == 0 or done == trainer.num_training_batches:
            seconds = self.time_left.seconds(trainer) if self.time_left else None
            self.left = "" if seconds is None else f"{clock(seconds)} left"
            self._metrics = fitting(shown_metrics(trainer.callback_metrics), self._room(trainer))
        return self._metrics

    def _room(self, trainer: Trainer) -> int:
        """Characters that the other columns leave to the metrics."""
        batches = len(f"{trainer.num_training_batches}/{trainer.num_training_batches}")
        label = max(len(epoch_label(trainer)), len(self.validation_description))
        others = [label, batches, len(self.left), *((WIDE_BAR, SPEED) if self._is_wide() else (NARROW_BAR,))]
        return (self._console.width if self._console else 80) - sum(others) - len(others)


def fitting(metrics: dict[str, str], room: int) -> dict[str, str]:
    """The metrics that fit on a line, in their order. The learning rate is dropped first, then metrics of your own."""
    last = ["lr", "acc1", "loss", "val/acc1"]
    kept = metrics.copy()
    for name in ["lr", *(name for name in reversed(metrics) if name not in last), *last[1:]]:
        if len("  ".join(f"{name}: {value}" for name, value in kept.items())) <= room:
            break
        kept.pop(name, None)
    return kept


def clock(seconds: float) -> str:
    """Seconds as "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class EpochLines(Callback):
    """One line for each epoch, in a log or above the bar of a terminal.

    Args:
        wait: comes before this one among the callbacks; the line ends with its `line`.
        width: most characters on a line, which leaves out less important parts; None is no limit.
    """

    def __init__(self, wait: DataWait, width: int | None = None) -> None:
        self.wait, self.width = wait, width
        self._batches, self._sum = 0, torch.zeros(len(MEANS))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()  # a run that is resumed within an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()
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
        means = dict(trainer.callback_metrics)
        if self._batches:
            mean = self._sum.to(pl_module.device) / self._batches  # a checkpoint's sum is on the host
            mean = trainer.strategy.reduce(mean, reduce_op="mean")
            means |= dict(zip(MEANS, mean, strict=True))
        if trainer.is_global_zero:
            label, seconds = epoch_label(trainer), f"{time.monotonic() - self._start:.1f} s"
            shown = shown_metrics(means)
            if self.width is not None:
                shown = fitting(shown, self.width - len(label) - len(seconds) - 4)
            parts = [label, *(f"{name}: {value}" for name, value in shown.items()), seconds]
            line = "  ".join(parts)
            if self.width is None or len(line) + len(self.wait.line) + 2 <= self.width:
                line += f", {self.wait.line}"
            print(line, flush=True)


def never_right(trainer: Trainer, pl_module: Any) -> str:
    """The classes that the last validation never got right: their number and the first names; "" for none."""
    counts = pl_module.val_metrics.per_class
    if counts is None or "val/acc1" not in trainer.callback_metrics:  # no validation, or only the check at the start
        return ""
    names: list[str] = trainer.datamodule.class_names  # type: ignore[attr-defined]
    missed = [name for name, (images, correct) in zip(names, counts.tolist(), strict=True) if images and not correct]
    some = ", ".join(missed[:NAMES]) + (", ..." if len(missed) > NAMES else "")
    return f"{len(missed)} of {len(names)} classes in the last validation: {some}" if missed else ""


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next."""

    def __init__(self, run: Run) -> None:
        self.run, self.run_dir, self.first_step = run, run.folder, run.first_step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            if (self.run_dir / rundir.CHECKPOINTS / rundir.LAST).exists():
                resume = self.run.program.command("resume", self.run_dir)
                print(f"{how} at step {trainer.global_step:,}; to continue: {resume}", flush=True)
            else:
                print("interrupted before the first checkpoint", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        name, checkpoints = rundir.run_argument(self.run_dir), self.run_dir / rundir.CHECKPOINTS
        table = Table.grid(padding=(0, 2))
        if trainer.global_step == self.first_step:
            table.add_row("nothing to do", f"the run had finished its {trainer.global_step:,} steps")
        else:
            table.add_row("trained", f"to step {trainer.global_step:,} in {self._elapsed()}")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
                per_cent = callback.metric.split("/")[-1] in ("acc1", "acc5", "acc1_macro")
                score = f"{float(callback.best_model_score):{'.2f' if per_cent else '.4f'}}{' %' * per_cent}"
                table.add_row("best", f"{callback.monitor} {score}   {checkpoints / rundir.BEST}")
        if missed := never_right(trainer, pl_module):
            table.add_row("never right", missed)
        if (checkpoints / rundir.LAST).exists():
            table.add_row("last", str(checkpoints / rundir.LAST))
        if (self.run_dir / rundir.METRICS).exists():
            table.add_row("metrics", f"{self.run_dir / rundir.METRICS}, and TensorBoard's events")
        table.add_row("", "")
        table.add_row("evaluate", self.run.program.command("eval", self.run_dir))
        for suggest in plugins.of_kind("suggest"):
            for row in suggest(self.run):
                table.add_row(*row)
        length, end = ("max_steps", trainer.max_steps) if trainer.max_steps > 0 else ("max_epochs", trainer.max_epochs)
        table.add_row(
            "train longer", self.run.program.command("resume", self.run_dir, f"--trainer.{length} {2 * (end or 0)}")
        )
        elsewhere = f' ARGS="--logdir {self.run_dir.parent}"' if name != self.run_dir.name else ""
        table.add_row("watch all runs", f"make tensorboard{elsewhere}")
        Console().print(Panel(table, title=f"run {self.run_dir.name}", title_align="left", expand=False))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
