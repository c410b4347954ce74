"""What a run prints at its end: its results and what to type next."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cait import plugins
from cait.errors import UserError, console, printable, to_type
from cait.extras.words import duration
from cait.progress import Position
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint

LOOKS = {"see its mistakes": "visualize", "draw the curves": "plot"}
"""What to do with a run, and the verb for it, if there is one."""


class RunSummary(Callback):
    """After training: the best value, where the checkpoints are and what to type next.

    Args:
        run: its folder, the step that it started from, and the program that it was started with.
    """

    def __init__(self, run: plugins.Run) -> None:
        self.run, self.run_dir, self._start = run, run.folder, time.monotonic()

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
            for row in [*self._results(trainer), ("", ""), *self._commands(trainer)]:
                table.add_row(*row)
            title = Text(printable(f"run {self.run_dir.name}"))
            console().print(Panel(table, title=title, title_align="left", expand=False))

    def _results(self, trainer: Trainer) -> list[tuple[str, str]]:
        checkpoints, step = self.run_dir / rundir.CHECKPOINTS, trainer.global_step
        rows = [("trained", f"to step {step:,} in {duration(time.monotonic() - self._start)}")]
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
            *(("train longer", command("resume", self.run_dir, options)) for options in _twice_as_long(trainer)),
            ("watch all runs", watch),
        ]


def _twice_as_long(trainer: Trainer) -> list[str]:
    """The options of a resume that trains twice as long; none if the run ended before its limits."""
    position = Position.of(trainer)
    limits = [("max_epochs", trainer.max_epochs, position.epoch), ("max_steps", trainer.max_steps, position.step)]
    options = [f"--trainer.{name} {2 * end}" for name, end, done in limits if end and 0 < end <= done]
    return [" ".join(options)] if options else []
