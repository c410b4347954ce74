"""The figures that a run has logged, read back from its metrics.csv."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from cait import run
from cait.errors import UserError

Curve = tuple[list[int], list[float]]
"""Optimiser steps, and the value at each."""


def read(folder: Path) -> dict[str, Curve]:
    """The curves of a run by metric, as "val/acc1", in the order of the steps; "epoch" is one of them.

    A step that was logged twice, in two rows, counts once. Cells that hold no number are left out.

    Raises:
        UserError: the run has logged nothing.
    """
    path = folder / run.METRICS
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is missing: the run has logged nothing yet") from error
    found: dict[str, dict[int, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        step = _number(row.pop("step", None))
        for name, cell in row.items():
            value = _number(cell)
            if step is not None and value is not None:
                found.setdefault(name, {})[int(step)] = value
    if not found:
        raise UserError(f"{path} holds no figures yet")
    return {name: (sorted(values), [values[step] for step in sorted(values)]) for name, values in found.items()}


def steps_per_epoch(curves: dict[str, Curve]) -> float | None:
    """Optimiser steps of one epoch; None if the run is within its first."""
    steps, epochs = curves.get("epoch", ([], []))
    if not epochs or max(epochs) < 1:
        return None
    return max((step + 1) / (epoch + 1) for step, epoch in zip(steps, epochs, strict=True))


def _number(cell: object) -> float | None:
    try:
        value = float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # empty, or torn by a kill
        return None
    return value if math.isfinite(value) else None
