"""The table of a sweep's trials, on the screen and as a CSV file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optuna import Study
from rich import box
from rich.table import Table

from cait.errors import console
from cait.extras.sweep import studies
from cait.extras.sweep.search_space import SearchSpace
from cait.settings import as_text

STATES = ("complete", "pruned", "running", "waiting", "fail")
"""Optuna's, in the order of the table."""
Row = dict[str, Any]
"""A trial, by the columns of trials.csv."""


def read_rows(study: Study, search: SearchSpace, folder: Path) -> list[Row]:
    """The trials, best first; then those stopped early, running, interrupted and failed."""
    rows: list[Row] = [
        {
            "trial": place,
            "state": trial.state.name.lower(),
            search.metric: best(trial.intermediate_values.values(), search),
            "validations": len(trial.intermediate_values),
            **{name: trial.params.get(name) for name in search.axes},
            "run": studies.trial_folder(folder, place),
            "cause": trial.user_attrs.get("cause", ""),
        }
        for place, trial in studies.last_tries(study).items()
        if place < search.trials
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
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else as_text(value)


def show(rows: list[Row], search: SearchSpace) -> None:
    """Print the table, and below it why trials have failed."""
    screen = console(highlight=False)
    columns = ["trial", "state", search.metric, "validations", *search.axes]
    table = Table(*(name.rpartition(".")[2] for name in columns), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(short(row[name]) for name in columns))
    screen.print(table)
    for row in rows:
        if row["cause"]:
            screen.print(f"trial {row['trial']} failed: {row['cause']}")
