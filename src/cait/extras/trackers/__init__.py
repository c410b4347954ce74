"""Log a run to W&B, MLflow or Comet beside metrics.csv."""

from importlib.util import find_spec
from typing import Any, Literal

from cait.errors import UserError, to_install
from cait.plugins import Run, Setting
from cait.run import rundir

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


PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}


def add_settings(line: Any, program: Any) -> None:
    """Add none; refuse a tracker whose package is missing before anything that takes long is imported."""
    from cait.cli.options import Options

    options = Options(line.verb)
    options.add_argument("--logger", nargs="?")
    name = options.parse_known_args(line.words)[0].logger
    if line.verb == "fit" and name in PACKAGES and find_spec(PACKAGES[name]) is None:
        raise UserError(
            f"--logger {name} needs its package: {to_install(PACKAGES[name].replace('_', '-'))}"
        )


def callbacks(run: Run) -> list[Any]:
    """What adds the logger of the tracker that --logger names."""
    name = run.config.logger
    logs = run.trainer.logger is not False
    useless = ""
    if name and not logs:
        useless = "--logger does nothing without --trainer.logger"
    elif run.config.logger_args and not name:
        useless = "--logger_args does nothing without --logger"
    if useless and run.first_step == 0:
        raise UserError(f"{useless}: leave it out")
    # of another run's folder, whose place it may take
    inside = (run.folder.parent / rundir.CONFIG).is_file()
    if not name or not logs or run.trainer.fast_dev_run or inside:  # these log nothing
        return []
    from lightning.pytorch.callbacks import LambdaCallback

    from cait.extras.trackers.trackers import tracker

    logger = tracker(name, run.config.logger_args, run.folder)
    return [LambdaCallback(setup=lambda trainer, *_, stage: trainer.loggers.append(logger))]
