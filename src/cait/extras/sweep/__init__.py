"""Search settings for the best run, in trials that Optuna draws and stops early."""

import os
from typing import Any

from cait.plugins import Run, Verb

VERBS = {
    "sweep": Verb(
        "cait.extras.sweep.verb:sweep",
        "search settings for the best run, in trials: cait sweep SPACE.yaml [--jobs N] [--show]",
    )
}
VARIABLE = "CAIT_TRIAL"
"""Set by the sweep for the process of a trial whose metric is to be reported: the trial's number."""


def callbacks(run: Run) -> list[Any]:
    """The report of a trial; none unless the run is a trial of a sweep that stops trials early."""
    number = os.environ.get(VARIABLE)
    if not number or run.trainer.enable_checkpointing is False or run.trainer.fast_dev_run:
        return []
    from cait.extras.sweep.callback import ReportTrial

    return [ReportTrial(run.folder, int(number), run.config.best_metric)]
