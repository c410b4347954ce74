"""Train on when nobody reads what a run prints any more: a terminal that has gone stops it as a signal does."""

from typing import Any

from cait.plugins import Run


def callbacks(run: Run) -> list[Any]:
    """What guards the standard streams while the run trains."""
    from cait.extras.terminal.output import GuardedOutput

    return [GuardedOutput()]
