"""`cait paper`: the rows of the paper's tables."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from cait.cli.options import Options
from cait.errors import UserError, console
from cait.extras import curves
from cait.guards import configurations
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.extras.paper.rows import Row

WHAT = """\
List the rows of the paper's tables: what differs, published and reproduced accuracy, and the command that runs it. With
--json also the size and the cost."""


def show(arguments: list[str], program: Program) -> None:
    """Print the rows of a table, or of all."""
    options = Options("paper", WHAT)
    options.add_argument("table", metavar="TABLE", nargs="?", help="default all")
    options.add_argument("--json", action="store_true", help="print a JSON list")
    given = options.parse_args(arguments)
    from cait.extras.paper.rows import rows, tables

    if given.table and given.table not in tables():
        raise UserError(f"the paper has no table {given.table!r} here; choose one of {', '.join(tables())}")
    chosen = [row for row in rows().values() if given.table in (None, row.table)]
    if given.json:
        print(json.dumps([_as_dict(row) for row in chosen], indent=1, ensure_ascii=False))
    else:
        _print(chosen)


def _reproduced(row: Row) -> str:
    """The last accuracy of the row's run in logs/, if that is of the row's network, else "not run"."""
    try:
        trained = configurations.settings(row.run_dir / "hparams.yaml")
        scored = [line for line in curves.rows(row.run_dir).values() if "val/acc1" in line]
    except (OSError, UserError):
        return "not run"
    if not scored or not row.is_of(trained):
        return "not run"
    return f"{float(scored[-1]['val/acc1']):.2f} after {int(scored[-1]['epoch']) + 1} epochs"


def _as_dict(row: Row) -> dict[str, Any]:
    from cait.extras.paper.cost import cost

    counts = cost(row.network())
    return {
        "table": row.table,
        "row": row.name,
        "differs": row.differs,
        "settings": row.settings,
        "parameters": counts.parameters,
        "gmacs": round(counts.gmacs, 3),
        "parameters_published": row.parameters,
        "gflops_published": row.gflops,
        "top1_published": row.top1,
        "failed": row.failed,
        "reproduced": _reproduced(row),
        "command": row.command,
    }


def _print(chosen: list[Row]) -> None:
    from rich.table import Table

    from cait.extras.paper.rows import tables

    grids: dict[str, Table] = {}
    for row in chosen:
        if row.table not in grids:
            grids[row.table] = grid = Table(title=tables()[row.table]["title"], title_justify="left")
            grid.add_column("row", no_wrap=True)
            grid.add_column("what differs")
            grid.add_column("paper", justify="right")
            grid.add_column("reproduced")
        top1 = ("" if row.top1 is None else f"{row.top1}") + "†" * row.failed
        grids[row.table].add_row(row.id, row.differs, top1, _reproduced(row))
    # A table that is piped into a file keeps its columns.
    screen = console(width=None if sys.stdout.isatty() else 180)
    for grid in grids.values():
        screen.print(grid)
    screen.print("paper: top-1 on ImageNet in per cent; † the run broke down before its end.")
    for scored, what in ((False, "train a row"), (True, "score a row")):
        if example := next((row for row in chosen if row.evaluate is scored), None):
            screen.print(f"{what}: {example.command}", soft_wrap=True)
