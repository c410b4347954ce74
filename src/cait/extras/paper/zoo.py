"""`cait zoo`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from cait.cli.options import asks_for_help
from cait.errors import UserError
from cait.run.program import Program

USAGE = """\
usage: cait zoo [--json]

List the paper's models with their size, cost and published accuracy."""


def show(arguments: list[str], program: Program) -> None:
    """Print the models as a table or as a JSON list."""
    if asks_for_help(arguments):
        print(USAGE)
        return
    if arguments not in ([], ["--json"]):
        raise UserError("`cait zoo` takes no option but --json")
    from cait.extras.paper.models import zoo

    rows = zoo()
    if arguments:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _print(rows)


def _print(rows: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="CaiT: GMACs counted here beside the paper's GFLOPs; top-1 on ImageNet from the paper")
    for title in ("model", "pixels", "parameters", "GMACs", "N+1 rule", "paper", "top-1", "distilled"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        published = (row.gflops_published, row.top1_published, row.top1_distilled_published)
        table.add_row(
            row.model,
            str(row.img_size),
            f"{row.parameters:,}",
            f"{row.gmacs:.3f}",
            f"{row.gmacs_published_rule:.1f}",
            *("" if value is None else f"{value:.1f}" for value in published),
        )
    # A table that is piped into a file keeps its columns.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table)
    console.print('"N+1 rule": one more token in each self-attention block. The paper seems to count like this.')
