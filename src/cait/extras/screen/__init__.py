"""What a run shows: what is going to run, what looks like a mistake, a bar, a line an epoch, the results."""

import sys
from typing import Any

from cait.plugins import Run
from cait.references import is_path


def callbacks(run: Run) -> list[Any]:
    """The table at the start, a line for each epoch and the results, unless the Trainer's settings turn them off."""
    from lightning.pytorch.callbacks import ProgressBar

    from cait.extras.screen.anomaly import AnomalyLine
    from cait.extras.screen.progress import EpochLines, RunProgressBar
    from cait.extras.screen.tables import Banner, RunSummary

    shown: list[Any] = []
    if run.trainer.enable_progress_bar is not False:
        callbacks = run.trainer.callbacks
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if sys.stdout.isatty() and not any(
            isinstance(callback, ProgressBar) for callback in callbacks
        ):
            shown.append(RunProgressBar())
        shown.append(EpochLines())
    if run.trainer.enable_model_summary is not False:
        shown.append(Banner(run.data, None if run.trainer.fast_dev_run else run.folder))
    if run.trainer.detect_anomaly:
        shown.append(AnomalyLine())
    if run.keeps:
        shown.append(RunSummary(run))
    return shown


def step_callbacks(module: Any, data: Any) -> list[Any]:
    """A look at a network that is named as `package.module:factory`."""
    if not is_path(module.name):
        return []
    from cait.extras.screen.advice import Advice

    return [Advice()]
