"""Train one run on several machines: each lists its images once, and all must have the same data and code."""

from typing import Any

from cait.plugins import Run


def callbacks(run: Run) -> list[Any]:
    """What compares processes that Lightning starts; those of torchrun or SLURM compare, and share a listing, now."""
    from cait.extras.machines.machines import (
        Comparison,
        check_shared,
        compare,
        facts,
        list_once,
    )

    processes = run.program.processes
    if processes.started() == 1:
        return [Comparison(run)]
    list_once(run.data.source, processes)
    compare(facts(run), processes.agree)
    check_shared(run.folder, processes)
    return []
