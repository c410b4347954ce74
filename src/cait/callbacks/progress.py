"""What a run shows: a progress bar on a terminal, a line an epoch in a log, and a summary at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console
from rich.panel import Panel
from rich.progress import TimeRemainingColumn
from rich.table import Table

from cait.callbacks.data_wait import DataWait
from cait.callbacks.files import run_argument

# Name on the screen and format; what is not here is in metrics.csv.
SHOWN = {
    "train/loss": ("loss", "{:.3f}"),
    "train/acc1": ("acc1", "{:.1f}%"),
    "lr": ("lr", "{:.1e}"),
    "val/acc1": ("val/acc1", "{:.2f}%"),
}


def shown_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """The metrics of `SHOWN`, in its order, formatted."""
    return {label: form.format(float(metrics[name])) for name, (label, form) in SHOWN.items() if name in metrics}


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
        # To read a metric is to wait for the device, so only where the bar is drawn anew.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not trainer.training or done % self.refresh_rate == 0 or done == trainer.num_training_batches:
            self._metrics = shown_metrics(trainer.callback_metrics)
        return self._metrics


class ModelTable(ModelSummary):
    """The network's parts with their parameters, in place of Lightning's table of every submodule."""

    def __init__(self) -> None:
        super().__init__(max_depth=2)

    @staticmethod
    def summarize(summary_data: list[tuple[str, list[str]]], total_parameters: int, *args: Any, **kwargs: Any) -> None:
        columns = dict(summary_data)
        table = Table("part", "type")
        table.add_column("parameters", justify="right")
        for name, kind, count in zip(columns["Name"], columns["Type"], columns["Params"], strict=True):
            if name.startswith("model."):  # the rest is losses and metrics
                table.add_row(name.removeprefix("model."), kind, count.strip())
        table.add_section()
        table.add_row("all", "", f"{total_parameters:,}")
        Console().print(table)


class EpochLines(Callback):
    """One line for each epoch, for screens that cannot redraw: files, pipes, schedulers' logs.

    Args:
        wait: stands before this one among the callbacks, and what it has to say comes at the end of the line.
    """

    def __init__(self, wait: DataWait) -> None:
        self.wait = wait

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()  # a run that is resumed amid an epoch does not start one

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            metrics = trainer.callback_metrics
            means = {name: metrics.get(f"{name}_epoch", value) for name, value in metrics.items()}
            figures = "  ".join(f"{name}: {value}" for name, value in shown_metrics(means).items())
            print(
                f"{epoch_label(trainer)}  {figures}  {time.monotonic() - self._start:.1f} s, {self.wait.line}",
                flush=True,
            )


class RunSummary(Callback):
    """After training: what was reached, where the checkpoints lie and what to type next."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        self.run_dir, self.first_step = run_dir, first_step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            if (self.run_dir / "checkpoints" / "last.ckpt").exists():
                to_go_on = f"make resume RUN={run_argument(self.run_dir)}"
                print(f"{how} at step {trainer.global_step:,}; to go on: {to_go_on}", flush=True)
            else:
                print("interrupted before the first checkpoint", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or trainer.interrupted:
            return
        run, checkpoints = run_argument(self.run_dir), self.run_dir / "checkpoints"
        table = Table.grid(padding=(0, 2))
        if trainer.global_step == self.first_step:
            table.add_row("nothing to do", f"the run had finished its {trainer.global_step:,} steps")
        else:
            table.add_row("trained", f"to step {trainer.global_step:,} in {self._elapsed()}")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.best_model_score is not None:
                score = f"{callback.monitor} {float(callback.best_model_score):.2f} %"
                table.add_row("best", f"{score}   {checkpoints / 'best.ckpt'}")
        if (checkpoints / "last.ckpt").exists():
            table.add_row("last", str(checkpoints / "last.ckpt"))
        if (self.run_dir / "metrics.csv").exists():
            table.add_row("figures", f"{self.run_dir / 'metrics.csv'}, and TensorBoard events beside it")
        table.add_row("", "")
        table.add_row("evaluate", f"make eval RUN={run}")
        length, end = ("max_steps", trainer.max_steps) if trainer.max_steps > 0 else ("max_epochs", trainer.max_epochs)
        table.add_row("train longer", f'make resume RUN={run} ARGS="--trainer.{length} {2 * (end or 0)}"')
        elsewhere = f' ARGS="--logdir {self.run_dir.parent}"' if run != self.run_dir.name else ""
        table.add_row("see the curves", f"make tensorboard{elsewhere}")
        Console().print(Panel(table, title=f"run {self.run_dir.name}", title_align="left", expand=False))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
