"""`cait runs`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, console, one_line, printable, to_type
from cait.extras import curves
from cait.extras.network_name import network_name
from cait.guards import configurations
from cait.run import rundir
from cait.run.program import Program

ACCURACIES = ("val/acc1", "val/acc1_macro", "val_ema/acc1", "val_ema/acc1_macro")
"""Metrics whose largest value is the best, known without torch."""


@dataclass
class Row:
    """A run as its folder shows it; what the folder does not say is None."""

    name: str
    """What RUN= takes."""
    changed: float
    """When the run last logged something, in seconds since 1970."""
    state: str
    """"running", "finished", "stopped" before its end, or "failed" before its first checkpoint."""
    model: str | None = None
    data: str | None = None
    epochs: int = 0
    """Epochs that are done and validated."""
    planned: int | None = None
    """Planned epochs; None if only the steps are given."""
    steps: int = 0
    metric: str = ACCURACIES[0]
    """It chooses best.ckpt."""
    best: float | None = None
    """Its best value."""
    damage: str | None = None
    """What of it cannot be read, and why."""


def runs(arguments: list[str], program: Program) -> None:
    """Print the runs of a folder as a table or as a JSON list, the newest first."""
    options = Options("runs", "List the runs in logs/, the newest first; a sweep's trials are runs too.")
    options.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=rundir.LOGS, help="default logs")
    options.add_argument("--json", action="store_true", help="print a JSON list")
    given = options.parse_args(arguments)
    if not given.folder.is_dir() and given.folder != rundir.LOGS:
        raise UserError(f"there is no folder {given.folder}")
    # The runs' folders in it, and one level below it, where sweeps have theirs.
    folders = [path.parent for pattern in ("*", "*/*") for path in given.folder.glob(f"{pattern}/{rundir.CONFIG}")]
    rows = sorted(map(describe, folders), key=lambda row: row.changed, reverse=True)
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
    elif rows:
        _print(rows)
    else:
        start = to_type("make train", "cait fit --config digits.yaml")
        print(f"there are no runs in {given.folder} yet; `{start}` starts one")


def describe(folder: Path) -> Row:
    """Read what a run's folder says. Checkpoints are not opened."""
    if is_held(folder):
        state = "running"
    elif (folder / rundir.FINISHED).exists():
        state = "finished"
    else:
        state = "stopped" if any(folder.glob(f"{rundir.CHECKPOINTS}/*.ckpt")) else "failed"
    metrics = folder / rundir.METRICS
    row = Row(
        name=str(folder.relative_to(rundir.LOGS)) if folder.is_relative_to(rundir.LOGS) else str(folder),
        changed=(metrics if metrics.exists() else folder / rundir.CONFIG).lstat().st_mtime,
        state=state,
    )
    try:
        disk.check_inside(folder)
        mode = _take_settings(row, folder)
        if metrics.exists():
            _take_metrics(row, folder, mode)
    except (UserError, OSError, ValueError) as error:
        row.damage = one_line(error)
    return row


def _take_settings(row: Row, folder: Path) -> str | None:
    """Returns whether the largest ("max") or smallest value of the metric is best; None if nobody knows."""
    content = configurations.settings(folder / rundir.CONFIG)
    model, trainer = {"name?": str, "fields?": dict}, {"max_epochs?": int}
    best = {"best_metric?": str, "best_mode?": str}
    shape = {"model?": model, "trainer?": trainer, "data?": {"root?": str}, **best}
    disk.check_shape(content, shape, folder / rundir.CONFIG)
    settings: dict[str, Any] = {name: content.get(name) or {} for name in ("model", "trainer", "data")}
    if name := settings["model"].get("name"):
        row.model = network_name(name, settings["model"].get("fields"))
    row.data = settings["data"].get("root")
    planned = settings["trainer"].get("max_epochs")
    row.planned = planned if planned and planned > 0 else None
    row.metric = content.get("best_metric") or row.metric
    if mode := content.get("best_mode"):
        return str(mode)
    if row.metric in ACCURACIES:
        return "max"
    from cait.train.metrics import best_mode  # here, because torch takes seconds to import

    return best_mode(row.metric, {})


def _take_metrics(row: Row, folder: Path, mode: str | None) -> None:
    values = []
    for step, cells in curves.rows(folder).items():
        row.steps = max(row.steps, step + 1)
        validated = any(name.startswith("val") for name in cells)
        row.epochs = max(row.epochs, int(cells.get("epoch", 0)) + validated)
        if math.isfinite(value := float(cells.get(row.metric, "nan"))):
            values.append(value)
    if values and mode in ("max", "min"):
        row.best = max(values) if mode == "max" else min(values)


def is_held(folder: Path) -> bool:
    """Whether a process trains in the folder, on this machine or on one that shares the file system's locks."""
    import fcntl

    try:
        with disk.open_file(folder / rundir.LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock
    except BlockingIOError:
        return True
    except (OSError, UserError):  # no such file, or a file system without locks
        pass
    return False


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "model", "data", "epochs", "best", "changed", "state"):
        right = title in ("epochs", "best")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "data", overflow="fold")
    for row in rows:
        root = row.data or "?"
        table.add_row(
            row.name,
            row.model or "?",
            os.path.relpath(root) if Path(root).is_absolute() else root,
            f"{row.epochs}/{row.planned}" if row.planned else f"{row.steps:,} steps",
            "-" if row.best is None else f"{row.metric} {row.best:.{2 if 'acc' in row.metric else 4}f}",
            time.strftime("%b %d %H:%M", time.localtime(row.changed)),
            f"{row.state}, damaged" if row.damage else row.state,
        )
    # A table that is piped into a file keeps its columns.
    console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)
    for row in rows:
        if row.damage:
            print(f"damaged: {printable(row.damage)}", file=sys.stderr)
