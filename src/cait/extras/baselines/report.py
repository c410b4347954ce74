"""baselines.json of a run: read, as a table, and what follows from it."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from cait.errors import to_type
from cait.plugins import Results, Run
from cait.run.rundir import CONFIG

FILE = "baselines.json"
LONGER = 10
"""Minutes that a run gets next whose baselines are better, if it was shorter."""
SHOWN = 0.01
"""Points that the table tells apart; a run logs its accuracy in float32."""
UNITS = {"acc1": "top-1", "acc1_macro": "mean of the classes"}
Scores = dict[str, Any]


def read(folder: Path) -> Scores | None:
    """What the file holds; None if it is not there or not whole."""
    try:
        return json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
