"""Processes that train together agree before they start, watch each other, and end together."""

from typing import Any

from cait.plugins import Run, Setting

SETTINGS = [
    Setting(
        "silence_seconds",
        float | None,
        60.0,
        "Seconds without a sign of life after which a process counts as lost and all end; null waits for ever.",
    ),
]
PROCESSES = "cait.extras.watch.processes:WatchedProcesses"


def callbacks(run: Run) -> list[Any]:
    """What compares the processes' data and checkpoint, if they may be on several machines."""
    processes = run.program.processes
    if not processes.several():
        return []
    from cait.extras.watch.same_start import SameStart

    return [SameStart(run.data, processes)]
