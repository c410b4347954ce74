"""`cait runs`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cait.cli.options import Options
from cait.errors import UserError, printable, to_type
from cait.extras.network_name import network_name
from cait.file_lock import is_leased
from cait.run import rundir
from cait.run.program import Program

BEST = ("val/acc1", "val_ema/acc1")


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
    """Largest top-1 in per cent, by metric."""
    changed: float
    """When the run last logged something, in seconds since 1970."""
    state: str
    """"running", "finished", "stopped" before its end, or "failed" before its first checkpoint."""


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
    settings = _settings(folder)
    trainer, model = settings.get("trainer") or {}, settings.get("model") or {}
    metrics = folder / rundir.METRICS
    epochs, steps, best = _logged(metrics)
    planned = trainer.get("max_epochs")
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
        epochs=epochs,
        planned=planned if planned and planned > 0 else None,
        steps=steps,
        best=best,
        changed=(metrics if metrics.exists() else folder / rundir.CONFIG).stat().st_mtime,
        state=state,
    )


def _settings(folder: Path) -> dict[str, Any]:
    import yaml

    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.load((folder / rundir.CONFIG).read_text(), Loader=yaml.CSafeLoader)
        if isinstance(content, dict) and all(
            isinstance(content.get(key, {}), dict | None) for key in ("trainer", "model", "data")
        ):
            return content
    return {}


def _logged(path: Path) -> tuple[int, int, dict[str, float]]:
    """Finished epochs and steps, and the best of each metric of `BEST`, from metrics.csv.

    Rows are split at commas only: they hold numbers, and there may be a hundred thousand of them.
    """
    epochs = steps = 0
    best: dict[str, float] = {}
    with suppress(OSError, UnicodeDecodeError), path.open() as lines:
        names = next(lines, "").rstrip("\n").split(",")
        places = [(name, names.index(name)) for name in BEST if name in names]
        for line in lines:
            cells = line.rstrip("\n").split(",")
            row = dict(zip(names, cells, strict=False))
            if len(cells) < len(names) or not (row.get("epoch", "").isdigit() and row.get("step", "").isdigit()):
                continue
            scored = [(name, cells[place]) for name, place in places if cells[place]]
            epochs = max(epochs, int(row["epoch"]) + bool(scored))
            steps = max(steps, int(row["step"]) + 1)
            for name, cell in scored:
                with suppress(ValueError):
                    if math.isfinite(value := float(cell)):
                        best[name] = max(best.get(name, value), value)
    return epochs, steps, best


def is_held(folder: Path) -> bool:
    """Whether a process trains in the folder, on this machine or on one that shares the file system's locks."""
    import fcntl

    try:
        with (folder / rundir.LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return is_leased(folder / rundir.LOCK)
    return False


def _place(root: Any) -> str:
    """The data as the table shows it: a folder as it is seen from here."""
    return os.path.relpath(root) if root and Path(str(root)).is_absolute() else str(root or "?")


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "model", "data", "epochs", "val/acc1", "changed", "state"):
        right = title in ("epochs", "val/acc1")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "data", overflow="fold")
    for row in rows:
        table.add_row(
            escape(printable(row.name)),
            escape(printable(str(row.model or "?"))),
            escape(printable(_place(row.data))),
            f"{row.epochs}/{row.planned}" if row.planned else f"{row.steps:,} steps",
            _best(row.best),
            time.strftime("%b %d %H:%M", time.localtime(row.changed)),
            row.state,
        )
    # A table that is piped into a file keeps its columns.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=180, highlight=False)
    console.print(table)


def _best(best: dict[str, float]) -> str:
    if not best:
        return "-"
    name = max(best, key=lambda name: best[name])
    return f"{best[name]:.2f}{' EMA' if name != BEST[0] else ''}"
