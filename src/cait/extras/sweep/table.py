"""The table of a sweep's trials, on the screen and as a CSV file, and Optuna's figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from optuna import Study, visualization
from optuna.importance import FanovaImportanceEvaluator
from rich import box
from rich.table import Table

from cait.errors import console, one_line
from cait.extras.sweep import studies
from cait.extras.sweep.search_space import SearchSpace
from cait.settings import as_text

STATES = ("complete", "pruned", "running", "waiting", "fail")
"""Optuna's, in the order of the table."""
Row = dict[str, Any]
"""A trial, by the columns of trials.csv: trial, state, the metric, validations, seconds, run, the settings, cause."""


def read_rows(study: Study, search: SearchSpace, folder: Path) -> list[Row]:
    """The trials, best first; then those stopped early, running, interrupted and failed."""
    tries = {place: last for place, last in studies.last_tries(study).items() if place < search.trials}
    rows: list[Row] = [
        {
            "trial": place,
            "state": trial.state.name.lower(),
            search.metric: best(trial.intermediate_values.values(), search),
            "validations": len(trial.intermediate_values),
            "seconds": trial.duration.total_seconds() if trial.duration else None,
            "run": studies.trial_folder(folder, place),
            **{name: trial.params.get(name) for name in search.axes},
            "cause": trial.user_attrs.get("cause"),
        }
        for place, trial in tries.items()
    ]
    sign = -1 if search.mode == "max" else 1

    def order(row: Row) -> tuple[int, float]:
        value = row[search.metric]
        return STATES.index(row["state"]), math.inf if value is None else sign * value

    return sorted(rows, key=order)


def best(values: Iterable[float], search: SearchSpace) -> Any:
    """The best of a trial's values, that of best.ckpt; None if there are none."""
    return {"max": max, "min": min}[search.mode](values, default=None)


def short(value: Any) -> str:
    """A value as text, rounded for display."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)


def show(rows: list[Row], search: SearchSpace) -> None:
    """Print the table, and below it why trials have failed."""
    screen = console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("trial", search.metric, "validations", "s", *(name.split(".")[-1] for name in search.axes)):
        table.add_column(label, overflow="fold", justify="left" if label == "trial" else "right")
    for row in rows:
        mark = {"complete": "", "pruned": "*", "fail": " failed"}.get(row["state"], f" {row['state']}")
        value = "-" if row[search.metric] is None else f"{row[search.metric]:.5g}"
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        settings = [short(row[name]) for name in search.axes]
        table.add_row(f"{row['trial']}{mark}", value, str(row["validations"]), seconds, *settings)
    screen.print(table)
    if any(row["state"] == "pruned" for row in rows):
        screen.print("* stopped early: others were better by then")
    for row in rows:
        if row["cause"]:
            screen.print(f"trial {row['trial']} failed: {row['cause']}")


def write_figures(study: Study, search: SearchSpace, folder: Path) -> Iterator[str]:
    """Draw Optuna's figures; for each, give its file or why there is none."""
    mpl.use("Agg")
    drawing = visualization.matplotlib
    importances = partial(drawing.plot_param_importances, evaluator=FanovaImportanceEvaluator(seed=search.seed))
    wanted = {
        "history": drawing.plot_optimization_history,
        "importance": importances,
        "parallel": drawing.plot_parallel_coordinate,
    }
    for name, draw in wanted.items():
        try:
            with warnings.catch_warnings(action="ignore"):  # of axes on which all trials have one value
                figure = draw(study, target_name=search.metric).figure
        except (ValueError, RuntimeError, ImportError) as error:
            yield f"no {name}: {one_line(error)}"
            continue
        figure.set_size_inches(10, 5)
        figure.savefig(folder / f"{name}.png", bbox_inches="tight")  # Optuna's labels do not fit
        yield str(folder / f"{name}.png")
