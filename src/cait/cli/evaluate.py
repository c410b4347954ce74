"""`cait eval`: loss and accuracy on the validation set, shown as a table and written as evaluation.json."""

import filecmp
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from cait import disk, plugins, signature
from cait.cli import saved
from cait.cli.options import HELP, TRUST, Line, split_flag, split_run
from cait.data.folder import FolderSource
from cait.data.listing import below, composed, spelled
from cait.data.table import held_out_paths
from cait.errors import UserError, as_typed, console, tell_once
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
        print(as_typed(USAGE), end="")
        for setting in plugins.settings():
            if "eval" in setting.verbs:
                print(f"  --{setting.name}: {setting.help}")
        return
    trusted, words = split_flag(TRUST, arguments)
    with signature.only_own(trusted):
        line, folder = _line_of(words, program)
        from cait.cli.lightning import CaiTCLI

        class ScoringCLI(CaiTCLI):
            def validate(self, **arguments: Any) -> None:
                Scoring(self, folder).run(arguments)

        ScoringCLI(line, program)


def _line_of(words: list[str], program: Program) -> tuple[Line, Path | None]:
    """The command line of `cait eval`, and the folder of the run that it names, if it names one."""
    if "--help=all" in words:
        return Line("eval", ["--help"]), None
    if words and words[0].startswith("-"):
        line = Line("eval", words, trust.settings)
        line.extend(program)
        return line, None
    folder, words = split_run("eval", words)
    line = Line("eval", words, trust.settings)
    scoring = _settings_to_score(folder)  # first: a run without a checkpoint has nothing to score
    config = rundir.config(folder)
    line.layers[:0] = [(config, trust.settings(config, is_run=True)), (None, scoring)]
    return line, folder


def _settings_to_score(folder: Path) -> Settings:
    """The settings that score the best checkpoint of a run on every image that its training held out.

    This machine or the launcher says how many processes start, and not the run.
    """
    settings: Settings = {
        "trainer": {
            "limit_val_batches": None,  # whatever share training looked at
            "overfit_batches": 0,
            "devices": "auto",
            "num_nodes": 1,
        },
        "ckpt_path": str(rundir.best_checkpoint(folder, "score")),
        "output": str(folder / rundir.EVALUATION),
    }
    if (folder / rundir.VALIDATION).is_file():
        # `Scoring` reads that of the run, if the images are the run's
        settings["data"] = {"val_list": None}
    return settings


def _are_of_run(source: FolderSource, labels: str | None, folder: Path) -> bool:
    """Whether images are those of a run, although its folder or a copy has grown, or its table was corrected."""
    settings = saved.data_settings(folder)
    root = Path(settings.get("root", ""))
    is_root = os.path.realpath(source.root) == os.path.realpath(root)
    is_table = os.path.realpath(labels or "") == os.path.realpath(settings.get("labels") or "")
    file = folder / rundir.VALIDATION
    if not file.is_file():
        return is_root and is_table
    if is_root and (is_table or not labels):
        return True
    held_out = {*held_out_paths(file, source.root)}
    images = {composed(below(source.root, path)) for path, _ in source.images}
    if images <= held_out or images.isdisjoint(held_out):  # training has seen none of them
        return False
    if is_root:
        return True
    return held_out <= images and not any(_differs(name, source.root, root) for name in held_out)


def _differs(name: str, root: Path, other_root: Path) -> bool:
    """Whether a file is below both roots, with other bytes; the run's own folder may be gone."""
    other = other_root / spelled(other_root, name)
    return other.is_file() and not filecmp.cmp(root / spelled(root, name), other)


class Scoring:
    """The settings, Trainer, LightningModule and data module of a LightningCLI that is about to score.

    The run's `folder` is None if only a checkpoint or weights are named.
    """

    def __init__(self, cli: Any, folder: Path | None) -> None:
        self.folder = folder
        self.cli = cli
        self.config = cli.config.validate
        self.trainer = cli.trainer
        self.module = cli.model
        self.data = cli.datamodule
        self.chosen = "ema" if cli.uses_average and self.config.ema.decay is not None else "raw"
        """The key of the scores of the weights which other verbs use."""
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
            self._write_and_show(result)

    def _write_and_show(self, result: Scores) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        disk.write_json(self.output, result)
        core_rows = self._rows()
        added = [row for scorer in self.scorers for row in scorer.rows(core_rows, result)]
        show(result, core_rows + added, self.chosen)
        print(f"by class: {self.output}")
        for scorer in self.scorers:
            scorer.show(result)

    def _choose_images(self) -> None:
        """Score what a run has held out; of another folder, or table, all images: its training has seen none."""
        source, data, model = self.data.source, self.config.data, self.config.model
        if not isinstance(source, FolderSource) or data.get("val_list") is not None:
            return
        folder = self.folder or rundir.find_run(self.config.ckpt_path or model.weights or "")
        if folder is None:
            if model.pretrained and self.config.ckpt_path is None:
                source.validate_on(None)
            return
        if typed := self.cli.line.typed & {f"data.{name}" for name in source.divided_by}:
            raise UserError(
                f"--{min(typed)} does nothing where {folder} says what it held out: leave it out"
            )
        held_out = folder / rundir.VALIDATION
        if not _are_of_run(source, data.get("labels"), folder):
            source.validate_on(None)
        elif held_out.is_file():
            source.validate_on(held_out)

    def _tell_of_unreadable(self, scored: int) -> None:
        """Say how many images of a folder are left out, because they cannot be read."""
        source = self.data.source
        images = len(self.data.val_images)
        is_whole = (
            self.config.trainer.limit_val_batches in (None, 1.0) and not self.module.task.several
        )
        if isinstance(source, FolderSource) and is_whole and scored < images:
            root = shlex.quote(str(source.root))
            tell_once(
                f"{images - scored:,} of {images:,} images cannot be read, and are not scored: "
                f"`cait check {root}` names them"
            )

    def validate(self, **arguments: Any) -> dict[str, Scores]:
        """Trainer.validate's scores of the raw weights, as "raw", and of their moving average, if any, as "ema"."""
        from cait.train.callbacks import EMA

        # the table has the figures of Lightning's
        self.trainer.validate(**arguments | {"verbose": False})
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
        scores: Scores = {}
        for key, value in self.trainer.callback_metrics.items():
            if key.startswith(prefix):
                scores[key.removeprefix(prefix)] = float(value) if math.isfinite(value) else None
        return scores | metrics.by_class(self.data.class_names)

    def _about(self) -> Scores:
        config = self.config
        return {
            "weights": config.ckpt_path or config.model.weights or f"timm's {self.module.name}",
            "epoch": self.cli.checkpoint_epoch,
            "step": self.cli.checkpoint_step,
            "model": self.module.name,
            **self.data.preprocessing,
            "root": str(self.data.root),
            "val_split": config.data.val_split,
            "class_names": self.data.class_names,
        }

    def _rows(self) -> list[Row]:
        titles = {"acc1": "top-1", "acc5": "top-5", "acc1_macro": "mean of the classes"}
        rows = [Row(title, "{:.2f} %", (name,)) for name, title in titles.items()]
        names = ["loss"]
        for key in self.trainer.callback_metrics:
            name = key.removeprefix("val/")
            if name != key and name not in ("loss", *titles):
                names.append(name)
        rows += [Row(name, "{:.4f}", (name,)) for name in names]
        return [*rows, Row("images", "{:,}", ("images",))]


def show(result: Scores, rows: Sequence[Row], chosen: str) -> None:
    """Print the scores of the raw weights and of their average, and which of both are `chosen`."""
    titles = {"raw": "raw"}
    if "ema" in result:
        titles["ema"] = "EMA"
        titles[chosen] += ", in use"
    table = Table("")
    for title in titles.values():
        table.add_column(title, justify="right")
    for row in rows:
        cells = [_cell(row, result[key]) for key in titles]
        if any(cells):
            table.add_row(row.title, *cells)
    print(
        f"{result['weights']} at {result['img_size']} pixels, {result['fit']} {result['crop_pct']}"
    )
    console().print(table)


def _cell(row: Row, scores: Scores) -> str:
    """The figure of a row; empty if there is none."""
    figure: Any = scores
    for key in row.place:
        figure = (figure or {}).get(key)
    return "" if figure is None else row.form.format(figure)
