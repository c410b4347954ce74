"""What a run prints at its end: its results and what to type next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cait import plugins
from cait.errors import UserError, console, printable, to_type
from cait.extras.clock import Clock, duration
from cait.progress import Position
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint

LOOKS = {"see its mistakes": "visualize", "draw the curves": "plot"}
"""What to do with a run, and the verb for it, if there is one."""
NAMES = 5
"""Classes that the summary names."""


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next.

    Args:
        run: its folder, the step that it started from, and the program that it was started with.
        clock: comes before this one among the callbacks.
    """

    def __init__(self, run: plugins.Run, clock: Clock) -> None:
        self.run, self.run_dir, self.clock = run, run.folder, clock

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit) and trainer.is_global_zero:
            how = "stopped, saved" if isinstance(exception, SystemExit) else "interrupted"
            if (self.run_dir / rundir.CHECKPOINTS / rundir.LAST).exists():
                resume = self.run.program.command("resume", self.run_dir)
                print(f"{how} at step {trainer.global_step:,}; to continue: {resume}", flush=True)
            else:
                print("interrupted before the first checkpoint", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            table = Table.grid(padding=(0, 2))
            for row in [*self._results(trainer, pl_module), ("", ""), *self._commands(trainer)]:
                table.add_row(*row)
            title = Text(printable(f"run {self.run_dir.name}"))
            console().print(Panel(table, title=title, title_align="left", expand=False))

    def _results(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        checkpoints, step = self.run_dir / rundir.CHECKPOINTS, trainer.global_step
        rows = [("trained", f"to step {step:,} in {duration(self.clock.total)}")]
        if step == self.run.first_step > 0:
            rows = [("nothing to do", f"the run had finished its {step:,} steps")]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
                score = float(callback.best_model_score)
                per_cent = callback.metric.split("/")[-1] in ("acc1", "acc5", "acc1_macro")
                shown = f"{score:.2f} %" if per_cent else f"{score:.4f}"
                rows.append(("best", f"{callback.monitor} {shown}   {checkpoints / rundir.BEST}"))
        with suppress(UserError):  # a damaged file of an earlier part of the run
            for table in plugins.results(self.run_dir):
                rows += [
                    (what, f"{table.head[-1]} {figure}   {', '.join(words)}") for what, *words, figure in table.rows
                ]
                rows += [("note", table.note)] if table.note else []
        if missed := never_right(trainer, pl_module):
            rows.append(("never right", missed))
        if (checkpoints / rundir.LAST).exists():
            rows.append(("last", str(checkpoints / rundir.LAST)))
        if (self.run_dir / rundir.METRICS).exists():
            rows.append(("metrics", f"{self.run_dir / rundir.METRICS}, and TensorBoard's events"))
        return rows

    def _commands(self, trainer: Trainer) -> list[tuple[str, str]]:
        command, verbs = self.run.program.command, plugins.merged("VERBS")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        in_logs = rundir.run_argument(self.run_dir) == self.run_dir.name
        folder = f"--logdir {self.run_dir.parent}"
        watch = to_type("make tensorboard" + ("" if in_logs else f' ARGS="{folder}"'), f"tensorboard {folder}")
        return [
            ("evaluate", command("eval", self.run_dir)),
            *(row for callback in callbacks for row in getattr(callback, "suggestions", list)()),
            *((what, command(verb, self.run_dir)) for what, verb in LOOKS.items() if verb in verbs),
            *(("train longer", command("resume", self.run_dir, options)) for options in further(trainer)),
            ("watch all runs", watch),
        ]


def further(trainer: Trainer) -> list[str]:
    """The options of a resume that trains on: twice each limit that ended the run; none if the patience did."""
    position, callbacks = Position.of(trainer), trainer.callbacks  # type: ignore[attr-defined]
    if position.step == 0:
        return []
    limits = [("max_epochs", trainer.max_epochs, position.epoch), ("max_steps", trainer.max_steps, position.step)]
    options = [f"--trainer.{name} {2 * end}" for name, end, done in limits if end and 0 < end <= done]
    for timer in (callback for callback in callbacks if isinstance(callback, Timer)):
        left, elapsed = timer.time_remaining(), timedelta(seconds=round(2 * timer.time_elapsed()))
        if left is not None and left <= 0:
            clock = time.strftime("%H:%M:%S", time.gmtime(elapsed.seconds))
            options.append(f"--trainer.max_time {elapsed.days:02}:{clock}")
    impatient = any(isinstance(each, EarlyStopping) and each.wait_count >= each.patience for each in callbacks)
    return [] if impatient and not options else [" ".join(options)]


def never_right(trainer: Trainer, pl_module: Any) -> str:
    """The classes that the last validation never got right: their number and the first names; "" for none."""
    counts = pl_module.val_metrics.per_class
    if counts is None or "val/acc1" not in trainer.callback_metrics:  # no validation, or only the check at the start
        return ""
    names: list[str] = trainer.datamodule.class_names  # type: ignore[attr-defined]
    missed = [name for name, (images, correct) in zip(names, counts.tolist(), strict=True) if images and not correct]
    return f"{len(missed)} of {len(names)} classes in the last validation: {first(missed)}" if missed else ""


def first(names: Sequence[str]) -> str:
    """The first `NAMES` of the names of classes."""
    return ", ".join(names[:NAMES]) + (", ..." if len(names) > NAMES else "")
