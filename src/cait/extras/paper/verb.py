"""`cait paper`: the rows of the paper's tables."""

from __future__ import annotations

from rich.table import Table

from cait.cli.options import Options
from cait.errors import UserError, table_console
from cait.extras import curves
from cait.extras.paper.rows import Row, rows, tables
from cait.guards import configurations
from cait.run.program import Program

WHAT = "List the rows of the paper's tables: what differs, published and reproduced accuracy, and how to run one."


def show(arguments: list[str], program: Program) -> None:
    """Print the rows of a table, or of all."""
    options = Options("paper", WHAT)
    options.add_argument("table", metavar="TABLE", nargs="?", help="default all")
    given = options.parse_args(arguments)
    if given.table and given.table not in tables():
        raise UserError(f"the paper has no table {given.table!r} here; choose one of {', '.join(tables())}")
    chosen = [row for row in rows().values() if given.table in (None, row.table)]
    screen = table_console(180)
    for name in dict.fromkeys(row.table for row in chosen):
        grid = Table(title=tables()[name]["title"], title_justify="left")
        grid.add_column("row", no_wrap=True)
        grid.add_column("what differs")
        grid.add_column("paper", justify="right")
        grid.add_column("reproduced")
        for row in chosen:
            if row.table == name:
                top1 = ("" if row.top1 is None else f"{row.top1}") + ("†" if row.failed else "")
                grid.add_row(row.id, row.differs, top1, _reproduced(row))
        screen.print(grid)
    screen.print("paper: top-1 on ImageNet in per cent; † the run broke down before its end.")
    for scored, what in ((False, "train a row"), (True, "score a row")):
        if example := next((row for row in chosen if row.evaluate is scored), None):
            screen.print(f"{what}: {example.command}", soft_wrap=True)


def _reproduced(row: Row) -> str:
    """The last accuracy of the row's run in logs/, if that is of the row's network, else "not run"."""
    try:
        trained = configurations.settings(row.run_dir / "hparams.yaml")
        scored = [line for line in curves.rows(row.run_dir).values() if "val/acc1" in line]
    except (OSError, UserError):
        return "not run"
    if not scored or not row.is_of(trained):
        return "not run"
    return f"{scored[-1]['val/acc1']:.2f} after {int(scored[-1]['epoch']) + 1} epochs"
