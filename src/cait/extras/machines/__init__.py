"""Train one run on several machines: each lists its images once, and all must have the same data and code."""

from typing import Any

from cait.plugins import Run


def callbacks(run: Run) -> list[Any]:
    """None; before torchrun's or SLURM's processes train they share a listing and compare what they have."""
    processes = run.program.processes
    if processes.started() > 1:
        from cait.extras.machines.machines import compare, facts, list_once

        list_once(run.data.source, processes)
        compare(facts(run), processes)
    return []
