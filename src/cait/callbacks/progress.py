"""What a run shows: a progress bar on a terminal, a line for each epoch in a log, and a summary at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console
from rich.panel import Panel
from rich.progress import TimeRemainingColumn
from rich.table import Table

from cait import run
from cait.callbacks.checkpoints import BestCheckpoint
from cait.callbacks.data_wait import DataWait

# Name on the screen and format. metrics.csv has the others.
SHOWN = {
    "train/loss": ("loss", "{:.3f}"),
    "train/acc1": ("acc1", "{:.1f}%"),
    "lr": ("lr", "{:.1e}"),
    "val/acc1": ("val/acc1", "{:.2f}%"),
    "val/acc1_macro": ("classes' mean", "{:.2f}%"),
}


NOT_SHOWN = ("val/acc5", "val/loss")


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


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar with loss, accuracy and learning rate in formats that show them."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_text_delimiter="  "))
        self._metrics: dict[str, str] = {}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        # Fewer and narrower columns than Lightning's, so that the metrics stay on the line.
        description, bar, batches, _, speed = super().configure_columns(trainer)
        bar.bar_width = 20
        return [description, bar, batches, TimeRemainingColumn(), speed]

    def _get_train_description(self, current_epoch: int) -> str:
        return epoch_label(self.trainer)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # Reading a metric waits for the device, so read only when the bar is drawn.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not trainer.training or done % self.refresh_rate == 0 or done == trainer.num_training_batches:
            self._metrics = shown_metrics(trainer.callback_metrics)
        return self._metrics


class EpochLines(Callback):
    """One line for each epoch, for output that cannot redraw: files, pipes, schedulers' logs.

    Args:
        wait: comes before this one among the callbacks; the line ends with its `line`.
    """

    def __init__(self, wait: DataWait) -> None:
        self.wait = wait

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()  # a run that is resumed within an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            metrics = trainer.callback_metrics
            means = {name: metrics.get(f"{name}_epoch", value) for name, value in metrics.items()}
            shown = "  ".join(f"{name}: {value}" for name, value in shown_metrics(means).items())
            print(
                f"{epoch_label(trainer)}  {shown}  {time.monotonic() - self._start:.1f} s, {self.wait.line}",
                flush=True,
            )


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        self.run_dir, self.first_step = run_dir, first_step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            if (self.run_dir / run.CHECKPOINTS / run.LAST).exists():
                resume = run.command("resume", self.run_dir)
                print(f"{how} at step {trainer.global_step:,}; to go on: {resume}", flush=True)
            else:
                print("interrupted before the first checkpoint", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or trainer.interrupted:
            return
        name, checkpoints = run.run_argument(self.run_dir), self.run_dir / run.CHECKPOINTS
        table = Table.grid(padding=(0, 2))
        if trainer.global_step == self.first_step:
            table.add_row("nothing to do", f"the run had finished its {trainer.global_step:,} steps")
        else:
            table.add_row("trained", f"to step {trainer.global_step:,} in {self._elapsed()}")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
                per_cent = callback.metric.split("/")[-1] in ("acc1", "acc5", "acc1_macro")
                score = f"{float(callback.best_model_score):{'.2f' if per_cent else '.4f'}}{' %' * per_cent}"
                table.add_row("best", f"{callback.monitor} {score}   {checkpoints / run.BEST}")
        if (checkpoints / run.LAST).exists():
            table.add_row("last", str(checkpoints / run.LAST))
        if (self.run_dir / run.METRICS).exists():
            table.add_row("metrics", f"{self.run_dir / run.METRICS}, and TensorBoard events beside it")
        table.add_row("", "")
        table.add_row("evaluate", run.command("eval", self.run_dir))
        length, end = ("max_steps", trainer.max_steps) if trainer.max_steps > 0 else ("max_epochs", trainer.max_epochs)
        table.add_row("train longer", run.command("resume", self.run_dir, f"--trainer.{length} {2 * (end or 0)}"))
        elsewhere = f' ARGS="--logdir {self.run_dir.parent}"' if name != self.run_dir.name else ""
        table.add_row("see the curves", f"make tensorboard{elsewhere}")
        Console().print(Panel(table, title=f"run {self.run_dir.name}", title_align="left", expand=False))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
