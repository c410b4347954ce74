"""What a run prints at its end: what looks like a mistake, its results and what to type next."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from cait import plugins
from cait.errors import UserError, console, printable, to_type
from cait.extras.clock import Clock, duration
from cait.progress import Position
from cait.run import rundir
from cait.run.checkpoints import BestCheckpoint

LOOKS = {"see its mistakes": "visualize", "draw the curves": "plot"}
"""What to do with a run, and the verb for it, if there is one."""
NAMES = 5
"""Classes that a warning names."""
ENOUGH = 5
"""Images of a class in the validation from which on one is expected to be right."""
TRAINED = 90.0
"""Accuracy in training, in per cent, with which a network has learned its training images."""


class RunSummary(Callback):
    """After training: warnings, the best value, where the checkpoints are and what to type next.

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

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        counts = getattr(getattr(pl_module, "val_metrics", None), "per_class", None)
        if not trainer.is_global_zero or counts is None or "val/acc1" not in trainer.callback_metrics:
            return
        trained = float(trainer.callback_metrics.get("train/acc1", math.nan))
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        for line in findings(trained, counts, data.class_names):
            print(f"warning: {line}", flush=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            table = Table.grid(padding=(0, 2))
            for row in [*self._results(trainer), ("", ""), *self._commands(trainer)]:
                table.add_row(*row)
            title = Text(printable(f"run {self.run_dir.name}"))
            console().print(Panel(table, title=title, title_align="left", expand=False))

    def _results(self, trainer: Trainer) -> list[tuple[str, str]]:
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
            *(("train longer", command("resume", self.run_dir, options)) for options in train_longer(trainer)),
            ("watch all runs", watch),
        ]


def train_longer(trainer: Trainer) -> list[str]:
    """The options of a resume that trains twice as long; none if a patience ended the run."""
    position = Position.of(trainer)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(each, EarlyStopping) and each.wait_count >= each.patience for each in callbacks):
        return []
    limits = [("max_epochs", trainer.max_epochs, position.epoch), ("max_steps", trainer.max_steps, position.step)]
    options = [f"--trainer.{name} {2 * end}" for name, end, done in limits if end and 0 < end <= done]
    return [" ".join(options)] if position.step else []


def findings(trained: float, counts: Tensor, names: list[str]) -> list[str]:
    """What the last validation shows that is probably a mistake, a line each.

    Args:
        trained: the last accuracy in training, in per cent; NaN if it is not known.
        counts: (images, correct) of each class in the validation, [num_classes, 2].
        names: of the classes.
    """
    found = []
    images, right = counts.sum(dim=0).tolist()
    if not images:
        return []
    largest = counts[:, 0].max().item() / images
    by_luck = largest + 2 * math.sqrt(largest * (1 - largest) / images)
    if trained >= TRAINED and right / images <= by_luck:
        found.append(
            f"training is right in {trained:.0f} % of the images, validation in {100 * right / images:.1f} %, no "
            "better than chance: look whether the validation images lie in the right class folders and look like "
            "the training images"
        )
    rows = zip(names, counts.tolist(), strict=True)
    if never := [name for name, (count, correct) in rows if count >= ENOUGH and not correct]:
        shown = ", ".join(never[:NAMES]) + (", ..." if len(never) > NAMES else "")
        found.append(
            f"{len(never)} of {len(names)} classes are never right in the last validation ({shown}): train longer; if "
            "they have few training images, add --data.balance full"
        )
    return found
