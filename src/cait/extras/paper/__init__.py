"""The paper's ten models, its ablations, and the rows of its tables, each a run: `--paper table1/layerscale-36`."""

from typing import Any

from cait.plugins import Verb
from cait.run.program import Program

VERBS = {
    "zoo": Verb(
        "cait.extras.paper.zoo:show", "list the paper's models, their size and cost", quick=True
    ),
    "paper": Verb(
        "cait.extras.paper.rows:show",
        "list the rows of the paper's tables, each a run: cait paper [TABLE]\n"
        "`cait fit --paper table1/layerscale-36` trains a row, any of its settings overridden",
        quick=True,
    ),
}
GROUPS = {"fields": "cait.extras.paper.ablations:Ablations"}


def add_settings(line: Any, program: Program) -> None:
    """Take the settings of a row of the paper for `--paper ROW`."""
    if "paper" in line.typed:
        from cait.extras.paper.rows import add_row

        add_row(line)
