"""The table of a sweep's trials, on the screen and as a CSV file, and Optuna's figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from optuna import Study, visualization
from optuna.importance import FanovaImportanceEvaluator
from rich import box
from rich.table import Table

from cait import ckpt
from cait.errors import UserError, console, one_line
from cait.extras import curves, plots
from cait.extras.sweep import trials
from cait.extras.sweep.search_space import SearchSpace
from cait.run import rundir
from cait.settings import as_text

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "running", "FAIL": "failed"}
"""Optuna's names and those of the table, in its order."""
CHANCE = 1.2
"""An accuracy up to so many times chance is hardly above it."""
Row = dict[str, Any]
"""A trial, by the columns of trials.csv: trial, state, the metric, epochs, seconds, run, the settings, cause."""


def read_rows(study: Study, search: SearchSpace, folder: Path) -> list[Row]:
    """The trials, best first; then those stopped early, running and failed."""
    rows: list[Row] = []
    for trial in study.get_trials(deepcopy=False):
        run, state = trials.trial_folder(folder, trial.number), STATES[trial.state.name]
        epochs = _logged(run, "epoch")
        rows.append(
            {
                "trial": trial.number,
                "state": state,
                search.metric: trial.value if state == "complete" else best_value(run, search),
                "epochs": f"{max(epochs) + 1:.0f}" if epochs else "-",
                "seconds": trial.user_attrs.get(trials.SECONDS),
                "run": run,
                **{name: trial.params.get(name) for name in search.axes},
                "cause": trial.user_attrs.get(trials.CAUSE),
            }
        )

    def place(row: Row) -> tuple[int, float]:
        value = row[search.metric]
        order = list(STATES.values()).index(row["state"])
        return order, math.inf if value is None else -value if search.mode == "max" else value

    return sorted(rows, key=place)


def best_value(run: Path, search: SearchSpace) -> float | None:
    """The best value of the metric that a run has logged, that of best.ckpt; None if it has logged none."""
    values = _logged(run, search.metric)
    return {"max": max, "min": min}[search.mode](values, default=None)


def _logged(run: Path, metric: str) -> list[float]:
    try:
        return curves.read(run).get(metric, ([], []))[1]
    except UserError:
        return []


def short(value: Any) -> str:
    """A value as text, rounded for display."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def show(rows: list[Row], search: SearchSpace) -> None:
    """Print the table, and below it why trials have failed."""
    screen = console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("trial", search.metric, "epochs", "s", *_labels(search)):
        table.add_column(label, overflow="fold", justify="left" if label == "trial" else "right")
    for row in rows:
        mark = {"complete": "", "pruned": "*"}.get(row["state"], f" {row['state']}")
        value = "-" if row[search.metric] is None else f"{row[search.metric]:.5g}"
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        settings = [short(row[name]) for name in search.axes]
        table.add_row(f"{row['trial']}{mark}", value, row["epochs"], seconds, *settings)
    screen.print(table)
    if any(row["state"] == "pruned" for row in rows):
        screen.print("* stopped early: others were better by then")
    for row in rows:
        if row["cause"]:
            screen.print(f"trial {row['trial']} failed: {row['cause']}")


def doubt(best: Row, search: SearchSpace) -> str:
    """A line if the best trial is no better than chance; empty otherwise, and for other metrics than accuracy."""
    value = best[search.metric]
    if search.metric != "val/acc1" or value is None:
        return ""
    try:
        path = rundir.best_checkpoint(best["run"], "read")
        names = ckpt.class_names(ckpt.read_checkpoint(path, without=ckpt.TENSORS))
    except UserError:
        return ""
    chance = 100 / len(names) if names else 0.0
    if value > CHANCE * chance:
        return ""
    return (
        f"the best trial's {value:.4g} % is hardly above chance, which is {chance:.4g} %: its settings say nothing; "
        "train the trials longer, or search other values"
    )


def _labels(search: SearchSpace) -> list[str]:
    """The names of the axes, as short as they stay distinct."""
    last = [name.split(".")[-1] for name in search.axes]
    return [name if last.count(short) > 1 else short for name, short in zip(search.axes, last, strict=True)]


def write_figures(study: Study, search: SearchSpace, folder: Path) -> Iterator[str]:
    """Draw Optuna's figures; for each, give its file or why there is none."""
    mpl.use("Agg")
    drawing, evaluator = visualization.matplotlib, FanovaImportanceEvaluator(seed=search.seed)
    wanted: dict[str, Callable[..., Any]] = {
        "history": drawing.plot_optimization_history,
        "importance": partial(drawing.plot_param_importances, evaluator=evaluator),
        "parallel": drawing.plot_parallel_coordinate,
    }
    for name, draw in wanted.items():
        path = folder / f"{name}.png"
        try:
            with warnings.catch_warnings(action="ignore"):  # of axes on which all trials have one value
                figure = draw(study, target_name=search.metric).figure
        except (ValueError, RuntimeError, ImportError) as error:
            yield f"no {name}: {one_line(error)}"
            continue
        figure.set_size_inches(10, 5)
        with mpl.rc_context({"savefig.bbox": "tight"}):  # Optuna's labels do not fit
            plots.write(figure, path)
        yield str(path)
