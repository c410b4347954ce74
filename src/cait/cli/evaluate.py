"""`cait eval`: loss and accuracy on the validation set, shown as a table and written as evaluation.json."""

import filecmp
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from cait import disk, plugins
from cait.cli import saved
from cait.cli.options import HELP, Line, split_run, split_trust
from cait.data.folder import FolderSource, composed, spelled
from cait.errors import UserError, console, tell_once
from cait.guards import trust
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings

USAGE = """\
usage: cait eval RUN [settings of fit]
       cait eval --config FILE --ckpt_path FILE|--model.weights FILE|--model.pretrained true
                 [settings of fit]

Score a network on the validation set, with the raw weights and with their moving average.
RUN is a name in logs/ or the path of a folder. It means the run's best checkpoint, or
--ckpt_path FILE, and every image counts, whatever part of them training looked at.
evaluation.json in the run's folder, or --output FILE, also has the accuracy of each class.
--trust-config runs the code that a run of somebody else names, or one whose config.yaml you have
changed. Read that code first: it may do anything. `cait eval --help=all` lists every setting.

"""

Scores = dict[str, Any]
"""Figures by name; a figure that cannot be computed is None, because JSON knows neither NaN nor infinity."""


class Row(NamedTuple):
    """A row of the table of scores; it is left out if no column has a figure."""

    title: str
    form: str
    """How a figure is shown, as "{:.2f} %"."""
    place: tuple[str, ...]
    """The keys that lead to the figure in the scores of a set of weights."""


def evaluate(arguments: list[str], program: Program) -> None:
    """Score a run, a checkpoint or weights."""
    if HELP & {*arguments}:
        options = (f"  --{setting.name}: {setting.help}" for setting in plugins.settings() if "eval" in setting.verbs)
        print(USAGE + "\n".join(options))
        return
    folder = None
    trusted, given = split_trust(arguments)
    with trust.only_own(trusted):
        if "--help=all" in given:
            line = Line("eval", ["--help"])
        elif given and given[0].startswith("-"):
            line = Line("eval", given, trust.settings)
            line.extend(program)
        else:
            folder, given = split_run("eval", given)
            line, scored = Line("eval", given, trust.settings), _settings_of(folder)
            config = rundir.config(folder)
            line.layers[:0] = [(config, trust.settings(config)), (None, scored)]
        from cait.cli.lightning import CaiTCLI

        class ScoringCLI(CaiTCLI):
            def validate(self, **arguments: Any) -> None:
                Scoring(self, folder).run(arguments)

        ScoringCLI(line, program)


def _settings_of(folder: Path) -> Settings:
    """The settings that score the best checkpoint of a run on every image that its training held out.

    This machine or the launcher says how many processes start, and not the run.
    """
    every = {"limit_val_batches": None, "overfit_batches": 0}  # whatever part training looked at
    settings: Settings = {
        "trainer": every | {"devices": "auto", "num_nodes": 1},
        "ckpt_path": str(rundir.best_checkpoint(folder, "score")),
        "output": str(folder / rundir.EVALUATION),
    }
    if (folder / rundir.VALIDATION).is_file():
        settings["data"] = {"val_list": None}  # `Scoring` reads that of the run, if the images are the run's
    return settings


def _is_own(folder: Path, source: FolderSource, labels: str | None) -> bool:
    """Whether images are those of a run: its folder, or a copy, may have grown since, or the table be corrected."""
    own, held_out, real = saved.data_settings(folder), folder / rundir.VALIDATION, os.path.realpath
    own_root = Path(own.get("root", ""))
    is_same, has_own_labels = real(source.root) == real(own_root), real(labels or "") == real(own.get("labels") or "")
    if not held_out.is_file():
        return is_same and has_own_labels
    if is_same and (not labels or has_own_labels):
        return True
    source.validate_on(None)
    listed = {composed(path) for path, _ in source.val}
    names = [row["path"] for _, row in disk.read_csv(held_out, str(held_out))]
    held = {composed(os.path.join(source.root, name)) for name in names}
    if listed <= held or listed.isdisjoint(held):  # all can be scored
        return False
    pairs = ((place / spelled(place, name) for place in (source.root, own_root)) for name in names)
    differ = (original.is_file() and not filecmp.cmp(image, original) for image, original in pairs)
    return is_same or (held <= listed and not any(differ))  # the run's own folder may be gone


class Scoring:
    """The settings, Trainer, LightningModule and data module of a LightningCLI that is about to score.

    The run's `folder` is None if only a checkpoint or weights are named.
    """

    def __init__(self, cli: Any, folder: Path | None) -> None:
        self.folder, self.typed = folder, cli.line.typed
        self.config = cli.config.validate
        self.trainer = cli.trainer
        self.module = cli.model
        self.data = cli.datamodule
        self.epoch, self.step = cli.checkpoint_epoch, cli.checkpoint_step
        self.chosen = "ema" if cli.uses_average and self.config.ema.decay is not None else "raw"
        """The part of the scores that is of the weights which other verbs use."""
        self.output = Path(self.config.output or rundir.EVALUATION)
        self.scorers: list[Any] = []
        """What extras add. Each is a callback of Lightning, and has
        - `scores`: what it has counted in the last validation, under "raw" and, if there is an average, "ema";
        - `extend(result)`: adds to evaluation.json, after further validations if need be, in every process;
        - `rows(core, result)`: gives further rows of the table; `show(result)`: prints what comes after it."""

    def run(self, arguments: Mapping[str, Any]) -> None:
        """Score the validation set, given as the arguments of Trainer.validate; print and write."""
        if self.trainer.limit_val_batches == 0:
            raise UserError("--trainer.limit_val_batches 0 scores nothing")
        if self.trainer.is_global_zero:
            disk.check_output(self.output)  # now, not after an hour
        self._choose_images()
        self.scorers = [make(self) for make in plugins.of_kind("scorers")]
        self.trainer.callbacks += self.scorers  # after EMA: they read its logits
        result = self._about() | self.validate(**arguments)
        for scorer in self.scorers:
            scorer.extend(result)
        self._tell_of_unreadable(result["raw"]["images"])
        if self.trainer.is_global_zero:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            disk.write_json(self.output, result)
            rows = self._rows()
            further = [row for scorer in self.scorers for row in scorer.rows(rows, result)]
            show(result, rows + further, self.chosen)
            print(f"by class: {self.output}")
            for scorer in self.scorers:
                scorer.show(result)

    def _choose_images(self) -> None:
        """Score what a run has held out; of another folder, or table, all images: its training has seen none."""
        source, data, model = self.data.source, self.config.data, self.config.model
        if not isinstance(source, FolderSource) or data.get("val_list") is not None:
            return
        folder = self.folder or rundir.of_checkpoint(self.config.ckpt_path or model.weights or "")
        if folder and (asked := self.typed & {f"data.{name}" for name in source.divided_by}):
            raise UserError(f"--{min(asked)} does nothing where {folder} says what it held out: leave it out")
        if folder and _is_own(folder, source, data.get("labels")):
            if (held_out := folder / rundir.VALIDATION).is_file():
                source.validate_on(held_out)
        elif folder or (model.pretrained and self.config.ckpt_path is None):
            source.validate_on(None)

    def _tell_of_unreadable(self, scored: int) -> None:
        """Say how many images of a folder are left out, because they cannot be read."""
        source, images = self.data.source, len(self.data.val_images)
        is_whole = self.config.trainer.limit_val_batches in (None, 1.0) and not self.module.task.several
        if isinstance(source, FolderSource) and is_whole and scored < images:
            out, check = f"{images - scored:,} of {images:,} images", f"cait check {shlex.quote(str(source.root))}"
            tell_once(f"{out} cannot be read, and are not scored: `{check}` names them")

    def validate(self, **arguments: Any) -> dict[str, Scores]:
        """Trainer.validate's scores of the raw weights, as "raw", and of their moving average, if any, as "ema"."""
        from cait.train.callbacks import EMA

        self.trainer.validate(**arguments | {"verbose": False})  # the table has the figures of Lightning's
        scores = {"raw": self._scores("val/", self.module.val_metrics)}
        average = EMA.among(self.trainer.callbacks)
        if average is not None and average.average is not None:
            scores["ema"] = self._scores("val_ema/", average.metrics)
        for scorer in self.scorers:
            for name, added in scorer.scores.items():
                scores[name] |= added
        return scores

    def _scores(self, prefix: str, metrics: Any) -> Scores:
        """The metrics that were logged under a prefix, and what the classes say of them."""
        scores: Scores = {
            key.removeprefix(prefix): float(value) if math.isfinite(value) else None
            for key, value in self.trainer.callback_metrics.items()
            if key.startswith(prefix)
        }
        return scores | metrics.by_class(self.data.class_names)

    def _about(self) -> Scores:
        config = self.config
        return {
            "weights": config.ckpt_path or config.model.weights or f"timm's {self.module.name}",
            "epoch": self.epoch,
            "step": self.step,
            "model": self.module.name,
            **self.data.preprocessing,
            "root": str(self.data.root),
            "val_split": self.config.data.val_split,
            "class_names": self.data.class_names,
        }

    def _rows(self) -> list[Row]:
        standard = ("loss", "acc1", "acc5", "acc1_macro")
        logged = [key.removeprefix("val/") for key in self.trainer.callback_metrics if key.startswith("val/")]
        return [
            Row("top-1", "{:.2f} %", ("acc1",)),
            Row("top-5", "{:.2f} %", ("acc5",)),
            Row("mean of the classes", "{:.2f} %", ("acc1_macro",)),
            Row("loss", "{:.4f}", ("loss",)),
            *(Row(name, "{:.4f}", (name,)) for name in logged if name not in standard),
            Row("images", "{:,}", ("images",)),
        ]


def show(result: Scores, rows: Sequence[Row], chosen: str) -> None:
    """Print the scores of the raw weights and of their average, and which of both are `chosen`."""
    scored = {name: result[key] for key, name in (("raw", "raw"), ("ema", "EMA")) if key in result}
    table = Table("")
    for column in scored:
        is_chosen = len(scored) > 1 and column.lower() == chosen
        table.add_column(f"{column}, in use" if is_chosen else column, justify="right")
    for row in rows:
        cells = [_cell(row.form, scores, row.place) for scores in scored.values()]
        if any(cells):
            table.add_row(row.title, *cells)
    print(f"{result['weights']} at {result['img_size']} pixels, {result['fit']} {result['crop_pct']}")
    console().print(table)


def _cell(form: str, scores: Scores, place: Sequence[str]) -> str:
    """The figure at a place in the scores; empty if there is none."""
    figure: Any = scores
    for key in place:
        figure = (figure or {}).get(key)
    return "" if figure is None else form.format(figure)
