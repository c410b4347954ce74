"""End a run whose metric does not get better: --early_stop.patience."""

from typing import Any

from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "early_stop.patience",
        int | None,
        None,
        "End the run after so many validations in a row without a better --best_metric; null trains to the end.",
        ("fit",),
    ),
    Setting("early_stop.min_delta", float, 0.0, "What counts as better: a gain of more than this.", ("fit",)),
]


def callbacks(run: Run) -> list[Any]:
    """The callback that --early_stop.patience asks for."""
    chosen = run.config.early_stop
    if chosen.patience is None:
        return []
    from cait.extras.early_stop.callback import EarlyStop

    return [EarlyStop(run.config.best_metric, run.best_mode, chosen.patience, chosen.min_delta)]
