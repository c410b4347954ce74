"""Score what is simple beside a run when it ends: chance, logistic regression on the pixels, nearest neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cait.plugins import Results, Run, Setting

SETTINGS = [
    Setting(
        "baselines",
        bool,
        False,
        "After training, score chance, logistic regression on the pixels and the nearest neighbours of the network's "
        "features on the validation images, into baselines.json. A recipe chosen for a folder sets it.",
        ("fit",),
    )
]
RECIPE_SETTINGS = {"baselines": True}


def callbacks(run: Run) -> list[Any]:
    """What scores them, if the run asks for it and keeps anything."""
    keeps_nothing = run.trainer.logger is False and run.trainer.enable_checkpointing is False
    several = getattr(run.data, "task", None) is not None  # they answer with one class
    if not run.config.baselines or run.trainer.fast_dev_run or keeps_nothing or several:
        return []
    from cait.extras.baselines.callback import Baselines

    return [Baselines(run)]


def results(folder: Path) -> Results | None:
    """The table of a run's baselines; None if there is none."""
    from cait.extras.baselines import report

    return report.table(found) if (found := report.read(folder)) else None


def suggest(run: Run) -> list[tuple[str, str]]:
    """A network to try if a baseline is better than the run."""
    from cait.extras.baselines import report

    return report.suggestion(run) if run.config.baselines else []
