"""`cait runs`."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from cait import disk
from cait.cli.options import Options
from cait.errors import UserError, one_line, table_console, tell, to_type
from cait.extras import curves
from cait.extras.display import network_name
from cait.guards import configurations
from cait.run import rundir
from cait.run.program import Program

METRIC = "val/acc1"
"""What chooses best.ckpt unless a setting says otherwise."""
SETTINGS = {
    "model?": {"name?": str, "fields?": dict},
    "trainer?": {"max_epochs?": int},
    "data?": {"root?": str},
    "best_metric?": str,
    "best_mode?": str,
}
"""What is read of config.yaml."""


def runs(arguments: list[str], program: Program) -> None:
    """Print the runs of a folder as a table or as a JSON list, the newest first."""
    options = Options(
        "runs", "List the runs in logs/, the newest first; a sweep's trials are runs too."
    )
    options.add_argument(
        "folder", metavar="DIR", nargs="?", type=Path, default=rundir.LOGS, help="default logs"
    )
    options.add_argument("--json", action="store_true", help="print a JSON list")
    args = options.parse_args(arguments)
    if args.folder.is_dir():
        os.scandir(args.folder).close()  # `glob` would find nothing in one that cannot be listed
    elif args.folder != rundir.LOGS:
        raise UserError(f"there is no folder {args.folder}")
    # The runs' folders in it, and one level below it, where sweeps have theirs.
    folders = [
        path.parent
        for pattern in ("*", "*/*")
        for path in args.folder.glob(f"{pattern}/{rundir.CONFIG}")
    ]
    rows = sorted(map(describe, folders), key=lambda row: row["changed"], reverse=True)
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    elif rows:
        _print(rows)
    else:
        start = to_type("make train", "cait fit --config digits.yaml")
        print(f"there are no runs in {args.folder} yet; `{start}` starts one")


def describe(folder: Path) -> dict[str, Any]:
    """What a run's folder says, None what it does not say. Checkpoints are not opened.

    `changed` is when the run last logged something, in seconds since 1970; `epochs` are done and validated, `planned`
    is how many there will be; `best` is the best value of `metric`, which chooses best.ckpt.
    """
    metrics = folder / rundir.METRICS
    config = folder / rundir.CONFIG
    name = (
        str(folder.relative_to(rundir.LOGS)) if folder.is_relative_to(rundir.LOGS) else str(folder)
    )
    changed = (metrics if metrics.exists() else config).lstat().st_mtime
    row: dict[str, Any] = {
        "name": name,
        "changed": changed,
        "state": _state(folder),
        "epochs": 0,
        "metric": METRIC,
    }
    row |= dict.fromkeys(["model", "data", "planned", "best", "damage"])
    try:
        disk.check_inside(folder)
        content = configurations.settings(config)
        disk.check_shape(content, SETTINGS, config)
        model, trainer, data = (content.get(group) or {} for group in ("model", "trainer", "data"))
        if model.get("name"):
            row["model"] = network_name(model["name"], model.get("fields"))
        row["data"] = data.get("root")
        row["planned"] = max(trainer.get("max_epochs") or 0, 0) or None
        row["metric"] = content.get("best_metric") or METRIC
        if metrics.exists():
            row["epochs"], row["best"] = _progress(folder, row["metric"], content.get("best_mode"))
        is_solved = row["state"] == "finished" and row["epochs"] == 0  # and the rest is frozen
        if is_solved or content.get("plan_minutes"):  # by its pace, after the first validation
            row["planned"] = None
    except (UserError, OSError, ValueError, OverflowError) as error:
        row["damage"] = one_line(error)
    return row


def _state(folder: Path) -> str:
    if is_held(folder):
        return "running"
    if (folder / rundir.FINISHED).exists():
        return "finished"
    return "stopped" if any(folder.glob(f"{rundir.CHECKPOINTS}/*.ckpt")) else "failed"


def _progress(folder: Path, metric: str, mode: str | None) -> tuple[int, float | None]:
    """The epochs that are done and validated, and the best value of a metric; None if nothing says what is best."""
    epochs = 0
    values = []
    for step, cells in curves.rows(folder).items():
        validated = any(name.startswith("val") for name in cells) and (
            step > 0 or "train/loss" in cells
        )
        epochs = max(epochs, int(cells.get("epoch", 0)) + validated)
        if math.isfinite(cells.get(metric, math.nan)):
            values.append(cells[metric])
    if mode is None and "acc1" in metric:
        mode = "max"
    elif mode is None:
        from cait.train.metrics import best_mode  # here, because torch takes seconds to import

        mode = best_mode(metric, {})
    return epochs, curves.best(values, mode)


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


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "model", "data", "epochs", "best", "changed", "state"):
        table.add_column(title, no_wrap=title != "data", overflow="fold")
    for row in rows:
        metric = row["metric"]
        best = row["best"]
        planned = row["planned"]
        table.add_row(
            row["name"],
            row["model"] or "?",
            row["data"] or "?",
            f"{row['epochs']}/{planned}" if planned else str(row["epochs"]),
            "-" if best is None else f"{metric} {best:.{2 if 'acc' in metric else 4}f}",
            time.strftime("%b %d %H:%M", time.localtime(row["changed"])),
            f"{row['state']}, damaged" if row["damage"] else row["state"],
        )
    table_console(180, highlight=False).print(table)
    for row in rows:
        if row["damage"]:
            tell(f"damaged: {row['damage']}")
