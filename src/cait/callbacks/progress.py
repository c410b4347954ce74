"""What a run shows: a progress bar on a terminal, a line an epoch in a log, and a summary at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

# Name on the screen and format of what the bar shows; the rest is in metrics.csv.
SHOWN = {
    "train/loss": ("loss", "{:.3f}"),
    "train/acc1": ("acc1", "{:.1f}%"),
    "lr": ("lr", "{:.2e}"),
    "val/loss": ("val/loss", "{:.3f}"),
    "val/acc1": ("val/acc1", "{:.2f}%"),
}


def shown_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """The metrics of `SHOWN`, in its order, formatted."""
    return {label: form.format(float(metrics[name])) for name, (label, form) in SHOWN.items() if name in metrics}


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar with loss, accuracy and learning rate in formats that show them."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_text_delimiter="  "))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return shown_metrics(trainer.progress_bar_metrics)


class EpochLines(Callback):
    """One line for each epoch, for screens that cannot redraw: files, pipes, schedulers' logs."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            figures = "  ".join(f"{name} {value}" for name, value in shown_metrics(trainer.callback_metrics).items())
            total = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
            seconds = time.monotonic() - self._start
            print(f"epoch {trainer.current_epoch + 1}{total}  {figures}  {seconds:.1f} s", flush=True)


class RunSummary(Callback):
    """After training: what was reached, where the checkpoints lie and what to type next."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            if (self.run_dir / "checkpoints" / "last.ckpt").exists():
                print(f"interrupted; to go on from the last whole epoch: make resume RUN={self.run_dir.name}")
            else:
                print("interrupted before the first checkpoint")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or trainer.interrupted:
            return
        run, checkpoints = self.run_dir.name, self.run_dir / "checkpoints"
        table = Table.grid(padding=(0, 2))
        table.add_row("trained", f"{trainer.current_epoch} epochs, {trainer.global_step:,} steps, {self._elapsed()}")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.best_model_score is not None:
                score = f"{callback.monitor} {float(callback.best_model_score):.2f} %"
                table.add_row("best", f"{score}   {checkpoints / 'best.ckpt'}")
        if (checkpoints / "last.ckpt").exists():
            table.add_row("last", str(checkpoints / "last.ckpt"))
        table.add_row("figures", f"{self.run_dir / 'metrics.csv'}, and TensorBoard events beside it")
        table.add_row("", "")
        table.add_row("evaluate", f"make eval RUN={run}")
        more = 2 * trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else 100
        table.add_row("train longer", f'make resume RUN={run} ARGS="--trainer.max_epochs {more}"')
        table.add_row("see the curves", "make tensorboard")
        Console().print(Panel(table, title=f"run {run}", title_align="left", expand=False))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


class EvalTable(Callback):
    """The figures of `validate` and `test` as a table."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer)

    def _show(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            table = Table("metric", "value")
            for name, value in sorted(trainer.callback_metrics.items()):
                table.add_row(name, f"{float(value):.4f}" if name.endswith("loss") else f"{float(value):.2f} %")
            Console().print(table)
