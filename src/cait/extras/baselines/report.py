"""baselines.json of a run: read, as a table, and what follows from it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from cait import disk
from cait.errors import UserError, printable, to_type
from cait.plugins import Results, Run
from cait.run.rundir import CONFIG

FILE = "baselines.json"
LONGER = 10
"""Minutes that a run gets next whose baselines are better, if it was shorter."""
SHOWN = 0.01
"""Points that the table tells apart; a run logs its accuracy in float32."""
SHAPE: Any = {
    **{"step": int, "metric": str, "run": {...: (int, float)}},
    "baselines": [
        {"name": str, "how": str, "seconds": (int, float), "acc1?": (int, float), "acc1_macro?": (int, float)}
    ],
}
UNITS = {"acc1": "top-1", "acc1_macro": "mean of the classes"}
Scores = dict[str, Any]


def read(folder: Path) -> Scores | None:
    """What the file holds; None if it is not there, UserError if it is damaged."""
    try:
        found = disk.read_json(folder / FILE, SHAPE, folder)
    except OSError:
        return None
    metric, entries = found["metric"], [found["run"], *found["baselines"]]
    if metric not in UNITS or any(metric not in entry for entry in entries):
        raise UserError(f"{folder / FILE}: metric is {printable(metric)}, which not all of it has")
    return found


def table(found: Scores) -> Results:
    """The run and its baselines, the best first."""
    metric = found["metric"]
    entries = [{"name": "this run", "how": f"its weights after step {found['step']:,}"} | found["run"]]
    entries += [entry | {"how": f"{entry['how']}, {entry['seconds']:.1f} s"} for entry in found["baselines"]]
    rows = [
        (entry["name"], entry["how"], f"{entry[metric]:.2f} %") for entry in sorted(entries, key=lambda e: -e[metric])
    ]
    return Results("Baselines", ("", "how", UNITS[metric]), rows, note(found))


def winner(found: Scores) -> Scores | None:
    """The best baseline, if it is better than the run."""
    metric = found["metric"]
    best = max(found["baselines"], key=lambda entry: entry[metric], default=None)
    return best if best and best[metric] >= found["run"][metric] + SHOWN else None


def note(found: Scores) -> str:
    better = winner(found)
    if better is None:
        return ""
    points = better[found["metric"]] - found["run"][found["metric"]]
    return f"{better['name']}: {points:.2f} points better than this run"


def suggestion(run: Run) -> list[tuple[str, str]]:
    """The command of a longer run, if a baseline is better than this one, and it was short."""
    found, root, option = read(run.folder), str(run.data.root), f"--minutes {LONGER}"
    if not found or not winner(found) or time.time() - (run.folder / CONFIG).stat().st_mtime > 60 * LONGER:
        return []
    if run.program.script:
        return [("try", f"python {run.program.script} fit --data.root {shlex.quote(root)} {option}")]
    root = shlex.quote(root)
    return [("try", to_type(f'make train DATA={root} ARGS="{option}"', f"cait fit --data.root {root} {option}"))]
