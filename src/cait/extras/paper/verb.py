"""`cait paper`, and `--paper ROW` of the other verbs."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.cli.options import Options
from cait.errors import UserError
from cait.extras import curves
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.extras.paper.cost import Cost
    from cait.extras.paper.rows import Row

WIDE = 120
"""The listing has the costs if the terminal has at least this many columns."""
WHAT = """\
List the rows of the paper's tables: what differs, size, cost, published and reproduced accuracy, and the command that
runs it."""


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


def replace_row(verb: str, arguments: list[str]) -> list[str]:
    """`arguments` with `--paper ROW` replaced by the row's settings; other given settings win.

    Raises:
        UserError: there is no such row, it cannot be trained, or the weights that it starts from are missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--paper")
    try:
        options, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError("--paper takes a row, as table1/layerscale-36; `cait paper` lists them") from error
    if options.paper is None:
        return arguments
    from cait.extras.paper.rows import row_named

    row = row_named(options.paper)
    names = {argument.split("=")[0] for argument in others}
    settings = [*row.arguments(), f"--paper_row={row.id}"]
    if verb == "fit":
        if row.evaluate:
            raise UserError(f"{row.id} trains nothing, it is scored: `{row.command}`")
        if "--run_name" not in names:
            settings.append(f"--run_name={row.run_name}")
    return [*settings, *_weights(verb, row, names), *others]


def _weights(verb: str, row: Row, names: set[str]) -> list[str]:
    """The weights that the verb starts from; nothing if the command line `names` some."""
    from cait.extras.paper.rows import row_named

    source = row if verb != "fit" and not row.evaluate else row.weights_of and row_named(row.weights_of, row.table)
    if not source or names & {"--model.weights", "--model.pretrained", "--ckpt_path"}:
        return []
    weights = source.run_dir / rundir.CHECKPOINTS / rundir.LAST
    if not weights.exists() and "--print_config" not in names:
        raise UserError(
            f"{row.id} needs the weights of {source.id}, and there is no {weights}: "
            f"`{source.command}` first, or give --model.weights FILE"
        )
    # A run of the row itself is read whole, because its moving average is scored too.
    found = [f"--{'ckpt_path' if source is row else 'model.weights'}={weights}"]
    return found + [f"--output={row.run_dir / rundir.EVALUATION}"] * (verb == "eval")


def _reproduced(row: Row) -> str:
    """The accuracy in the row's line, else the last of its run in logs/ if that is of this row, else "not run"."""
    if row.reproduced is not None:
        return f"{row.reproduced}"
    if (row.run_dir / rundir.METRICS).is_file() and row.is_of(_hparams(row.run_dir)):
        scored = [line for line in curves.rows(row.run_dir).values() if "val/acc1" in line]
        if scored:
            return f"{float(scored[-1]['val/acc1']):.2f} after {int(scored[-1]['epoch']) + 1} epochs"
    return "not run"


def _hparams(folder: Path) -> dict[str, Any]:
    """The module's hyper-parameters in a run's folder; none if it does not say."""
    import yaml

    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.safe_load((folder / "hparams.yaml").read_text())
        return content if isinstance(content, dict) else {}
    return {}


@functools.cache
def _cost(network: Any) -> Cost:
    from cait.extras.paper.cost import measure

    return measure(network)


def _as_dict(row: Row) -> dict[str, Any]:
    cost = _cost(row.network())
    return {
        "table": row.table,
        "row": row.name,
        "differs": row.differs,
        "settings": row.settings,
        "parameters": cost.parameters,
        "gmacs": round(cost.gmacs, 3),
        "parameters_published": row.parameters,
        "gflops_published": row.gflops,
        "top1_published": row.top1,
        "failed": row.failed,
        "reproduced": _reproduced(row),
        "command": row.command,
    }


def _print(chosen: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cait.extras.paper.rows import tables

    # A table that is piped into a file keeps its columns.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    costs = ("parameters", "GMACs") if console.width >= WIDE else ()
    shown: dict[str, Table] = {}
    for row in chosen:
        if row.table not in shown:
            shown[row.table] = grid = Table(title=tables()[row.table]["title"], title_justify="left")
            for title in ("row", "what differs", *costs, "paper", "reproduced"):
                copied = title == "row"
                right = title in (*costs, "paper")
                grid.add_column(title, justify="right" if right else "left", no_wrap=copied)
        cost = _cost(row.network())
        shown[row.table].add_row(
            row.id,
            row.differs,
            *((f"{cost.parameters:,}", f"{cost.gmacs:.3f}") if costs else ()),
            ("" if row.top1 is None else f"{row.top1}") + "†" * row.failed,
            _reproduced(row),
        )
    for grid in shown.values():
        console.print(grid)
    console.print("paper: top-1 on ImageNet in per cent; † the run broke down before its end.")
    for scored, what in ((False, "train a row"), (True, "score a row")):
        if example := next((row for row in chosen if row.evaluate is scored), None):
            console.print(f"{what}: {example.command}", soft_wrap=True)
