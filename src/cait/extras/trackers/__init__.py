"""Log a run to W&B, MLflow or Comet beside metrics.csv."""

from typing import Any, Literal

from cait.errors import UserError
from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "logger",
        Literal["wandb", "mlflow", "comet"] | None,
        None,
        "Tracker to log to beside metrics.csv and TensorBoard; a resumed run goes on under its id there.",
    ),
    Setting(
        "logger_args",
        dict[str, Any],
        {},
        "Arguments of Lightning's logger of that tracker, as {project: mine, offline: true}.",
    ),
]


def loggers(run: Run) -> list[Any]:
    """The logger of the tracker that --logger names."""
    name = run.config.logger
    if run.config.logger_args and not name:
        raise UserError("--logger_args are for a tracker: name it with --logger, or leave them out (--logger_args {})")
    if name and run.trainer.logger is False:
        raise UserError(f"--trainer.logger false leaves no room for --logger {name}; leave one out")
    if not name or run.trainer.fast_dev_run:  # that logs nothing
        return []
    from cait.extras.trackers.trackers import tracker

    return [tracker(name, dict(run.config.logger_args), run.folder, run.first_step)]
