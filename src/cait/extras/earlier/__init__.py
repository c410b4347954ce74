"""Read the runs of earlier versions: classes that have moved, settings that they did not record."""

from typing import Any

MOVED = {
    "cait.module": "cait.train.module",
    "cait.datamodule": "cait.data.datamodule",
    "cait.losses": "cait.train.losses",
    "cait.metrics": "cait.train.metrics",
    "cait.optim": "cait.train.optim",
    "cait.callbacks.ema": "cait.train.ema",
    "cait.callbacks.seeding": "cait.train.step_seed",
    "cait.callbacks.guard": "cait.guards.nonfinite",
    "cait.callbacks.checkpoints": "cait.run.checkpoints",
    "cait.callbacks.loggers": "cait.run.loggers",
}


def update_config(config: dict[str, Any]) -> dict[str, Any]:
    """Today's names and defaults in the configuration of a run."""
    from cait.extras.earlier.config import todays

    return todays(config)
