"""The table of a sweep's trials, on the screen and as a CSV file, and Optuna's figures."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait import disk
from cait.errors import UserError, one_line
from cait.extras import curves
from cait.extras.sweep import trials
from cait.extras.sweep.search_space import SearchSpace, optuna
from cait.settings import as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial

STATES = ("complete", "pruned", "running", "failed")
"""In the order of the table."""


@dataclass(frozen=True)
class Row:
    """One trial."""

    number: int
    state: str
    """one of `STATES`"""
    value: float | None
    epochs: str
    seconds: float | None
    folder: Path
    values: dict[str, Any]
    cause: str | None


def read_rows(study: Study, search: SearchSpace, folder: Path) -> list[Row]:
    """The trials, best first; then those stopped early, running and failed."""
    sign = -1 if search.mode == "max" else 1
    found = [
        _row(trial, search, trials.trial_folder(folder, trial.number)) for trial in study.get_trials(deepcopy=False)
    ]
    return sorted(
        found, key=lambda row: (STATES.index(row.state), sign * row.value if row.value is not None else math.inf)
    )


def _row(trial: FrozenTrial, search: SearchSpace, folder: Path) -> Row:
    state = "failed" if trial.state.name == "FAIL" else trial.state.name.lower()
    return Row(
        trial.number,
        state,
        trial.value if state == "complete" else best_value(folder, search),
        _epochs(folder),
        trial.user_attrs.get(trials.SECONDS),
        folder,
        {axis.name: trial.params.get(axis.name) for axis in search.axes},
        trial.user_attrs.get(trials.CAUSE),
    )


def best_value(folder: Path, search: SearchSpace) -> float | None:
    """The best value of the metric that a run has logged, that of best.ckpt; None if it has logged none."""
    try:
        _, values = curves.read(folder).get(search.metric, ([], []))
    except UserError:
        return None
    return {"max": max, "min": min}[search.mode](values, default=None)


def _epochs(folder: Path) -> str:
    try:
        return f"{max(curves.read(folder)['epoch'][1]) + 1:.0f}"
    except (UserError, KeyError):
        return "-"


def short(value: Any) -> str:
    """A value as text, rounded for display."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def write_csv(rows: list[Row], search: SearchSpace, path: Path) -> None:
    """Write the table, with all digits."""
    header = (
        "trial",
        "state",
        search.metric,
        "epochs",
        "seconds",
        "run",
        *(axis.name for axis in search.axes),
        "cause",
    )
    disk.write_csv(
        path,
        header,
        (
            (row.number, row.state, row.value, row.epochs, row.seconds, row.folder, *row.values.values(), row.cause)
            for row in rows
        ),
    )


def show(rows: list[Row], search: SearchSpace) -> None:
    """Print the table, and below it why trials have failed."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain: Any = {"markup": False, "highlight": False}
    console = Console(**plain) if sys.stdout.isatty() else Console(width=80, **plain)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("trial", search.metric, "epochs", "s", *_labels(search)):
        table.add_column(label, overflow="fold", justify="left" if label == "trial" else "right")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.5g}"
        mark = {"complete": "", "pruned": "*"}.get(row.state, f" {row.state}")
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        table.add_row(f"{row.number}{mark}", value, row.epochs, seconds, *map(short, row.values.values()))
    console.print(table)
    if any(row.state == "pruned" for row in rows):
        console.print("* stopped early: others were better by then")
    for row in rows:
        if row.cause:
            console.print(f"trial {row.number} failed: {row.cause}")


def _labels(search: SearchSpace) -> list[str]:
    """The names of the axes, as short as they stay distinct."""
    last = [axis.name.split(".")[-1] for axis in search.axes]
    return [axis.name if last.count(name) > 1 else name for axis, name in zip(search.axes, last, strict=True)]


def figures(study: Study, search: SearchSpace) -> dict[str, Figure | str]:
    """Figures by name: history, importance, parallel; or why there is none."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawing, seed = optuna().visualization.matplotlib, optuna().importance.FanovaImportanceEvaluator(seed=search.seed)
    wanted: dict[str, Callable[[], Any]] = {
        "history": lambda: drawing.plot_optimization_history(study, target_name=search.metric),
        "importance": lambda: drawing.plot_param_importances(study, evaluator=seed, target_name=search.metric),
        "parallel": lambda: drawing.plot_parallel_coordinate(study, target_name=search.metric),
    }
    drawn: dict[str, Figure | str] = {}
    for name, draw in wanted.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # of axes on which all trials have one value
                figure = draw().figure
            figure.set_size_inches(10, 5)
            drawn[name] = figure
        except (ValueError, RuntimeError, ImportError) as error:
            drawn[name] = one_line(error)
    return drawn
