"""`cait runs`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, console, one_line, printable, to_type
from cait.extras.network_name import network_name
from cait.guards import configurations
from cait.run import rundir
from cait.run.program import Program

SHOWN = ("val/acc1", "val/acc1_macro", "val_ema/acc1", "val_ema/acc1_macro")
"""Metrics whose values at the best validation are listed, beside the metric that chooses it."""


@dataclass(frozen=True)
class Row:
    """A run as its folder shows it; what the folder does not say is None."""

    name: str
    """What RUN= takes."""
    model: str | None
    data: str | None
    epochs: int
    """Epochs that are done and validated."""
    planned: int | None
    """Planned epochs; None if only the steps are given."""
    steps: int
    best: dict[str, float]
    """Values by metric at the validation that gave best.ckpt, first the metric that chose it."""
    changed: float
    """When the run last logged something, in seconds since 1970."""
    state: str
    """"running", "finished", "stopped" before its end, or "failed" before its first checkpoint."""
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
    rows = sorted(map(describe, folders(given.folder)), key=lambda row: row.changed, reverse=True)
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
    elif rows:
        _print(rows)
    else:
        start = to_type("make train", "cait fit --config digits.yaml")
        print(f"there are no runs in {given.folder} yet; `{start}` starts one")


def folders(root: Path) -> list[Path]:
    """The runs' folders in `root`, and one level below it, where sweeps have theirs."""
    return [path.parent for pattern in ("*", "*/*") for path in root.glob(f"{pattern}/{rundir.CONFIG}")]


def describe(folder: Path) -> Row:
    """Read what a run's folder says. Checkpoints are not opened."""
    damage: list[str] = []
    settings, logged = dict[str, Any](), Logged()
    with _noting(damage):
        disk.check_inside(folder)
        with _noting(damage):
            settings = _settings(folder)
        logged = Logged(*_chosen_by(settings))
        logged.read(folder, damage)
    trainer, model = settings.get("trainer") or {}, settings.get("model") or {}
    planned, metrics = trainer.get("max_epochs"), folder / rundir.METRICS
    if is_held(folder):
        state = "running"
    elif (folder / rundir.FINISHED).exists():
        state = "finished"
    else:
        state = "stopped" if any(folder.glob(f"{rundir.CHECKPOINTS}/*.ckpt")) else "failed"
    return Row(
        name=str(folder.relative_to(rundir.LOGS)) if folder.is_relative_to(rundir.LOGS) else str(folder),
        model=network_name(str(model["name"]), model.get("fields")) if model.get("name") else None,
        data=(settings.get("data") or {}).get("root"),
        epochs=logged.epochs,
        planned=planned if planned and planned > 0 else None,
        steps=logged.steps,
        best=logged.best,
        changed=(metrics if metrics.exists() else folder / rundir.CONFIG).lstat().st_mtime,
        state=state,
        damage=damage[0] if damage else None,
    )


@contextmanager
def _noting(damage: list[str]) -> Iterator[None]:
    """Note what cannot be read, and go on."""
    try:
        yield
    except (UserError, OSError) as error:
        damage.append(one_line(error))


def _settings(folder: Path) -> dict[str, Any]:
    content = configurations.settings(folder / rundir.CONFIG)
    model, trainer = {"name?": str, "fields?": dict}, {"max_epochs?": int}
    best = {"best_metric?": str, "best_mode?": (str, type(None))}
    shape = {"model?": model, "trainer?": trainer, "data?": {"root?": str}, **best}
    disk.check_shape(content, shape, folder / rundir.CONFIG)
    return content


def _chosen_by(settings: dict[str, Any]) -> tuple[str, str | None]:
    """The metric that chooses best.ckpt, and whether its largest ("max") or smallest value is; None if nobody knows."""
    metric, mode = settings.get("best_metric", SHOWN[0]), settings.get("best_mode")
    if mode is None and metric in SHOWN:
        return metric, "max"
    if mode is None:
        from cait.train.metrics import best_mode  # here, because torch takes seconds to import

        mode = best_mode(metric, {})
    return metric, mode


@dataclass
class Logged:
    """Finished epochs and steps, and the figures of the best validation, from metrics.csv."""

    metric: str = SHOWN[0]
    mode: str | None = "max"
    epochs: int = 0
    steps: int = 0
    best: dict[str, float] = field(default_factory=dict)

    def read(self, folder: Path, damage: list[str]) -> None:
        """Read the file, and note what in it is no row of metrics.

        Rows are split at commas only: they hold numbers, and there may be a hundred thousand of them.
        """
        path = folder / rundir.METRICS
        names, *lines = disk.read_text(path, within=folder).split("\n")[:-1] or [""] if path.exists() else [""]
        columns = names.rstrip("\r").split(",")
        places = {name: columns.index(name) for name in ("epoch", "step", self.metric, *SHOWN) if name in columns}
        for number, line in enumerate(lines, 2):
            try:
                self._take(places, line.rstrip("\r").split(","))
            except (ValueError, IndexError, KeyError, OverflowError):
                damage.append(f"{path}, line {number}, is no row of metrics: {line[:60]}")

    def _take(self, places: dict[str, int], cells: list[str]) -> None:
        row = {name: float(cells[place] or "nan") for name, place in places.items()}
        figures = {name: row.get(name, math.nan) for name in (self.metric, *SHOWN)}
        scored = {name: value for name, value in figures.items() if math.isfinite(value)}
        self.epochs = max(self.epochs, int(row["epoch"]) + bool(scored))
        self.steps = max(self.steps, int(row["step"]) + 1)
        sign = {"max": 1, "min": -1}.get(self.mode or "", math.nan)
        if sign * scored.get(self.metric, math.nan) > sign * self.best.get(self.metric, -sign * math.inf):
            self.best = scored


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


def _place(root: Any) -> str:
    """The data as the table shows it: a folder as it is seen from here."""
    return os.path.relpath(root) if root and Path(str(root)).is_absolute() else str(root or "?")


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "model", "data", "epochs", "best", "changed", "state"):
        right = title in ("epochs", "best")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "data", overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            row.model or "?",
            _place(row.data),
            f"{row.epochs}/{row.planned}" if row.planned else f"{row.steps:,} steps",
            _best(row.best),
            time.strftime("%b %d %H:%M", time.localtime(row.changed)),
            f"{row.state}, damaged" if row.damage else row.state,
        )
    # A table that is piped into a file keeps its columns.
    console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)
    for row in rows:
        if row.damage:
            print(f"damaged: {printable(row.damage)}", file=sys.stderr)


def _best(best: dict[str, float]) -> str:
    """The figure that chose best.ckpt, and its metric."""
    name, value = next(iter(best.items()), ("", 0.0))
    return f"{name} {value:.{2 if 'acc' in name else 4}f}" if name else "-"
