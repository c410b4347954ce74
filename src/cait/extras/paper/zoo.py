"""`cait zoo`: the paper's models, their cost as counted here beside the paper's own numbers."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from cait import disk
from cait.cli.options import Options
from cait.errors import table_console
from cait.extras.paper.rows import Row, rows
from cait.run.program import Program

Model = tuple[str, int]
"""A model and its resolution, as ("xxs24", 224)."""
COLUMNS = ("model", "pixels", "parameters", "GMACs", "N+1 rule", "paper", "top-1", "distilled")


class Cost(NamedTuple):
    """What a CaiT costs, as costs.csv has it; the tests count it again."""

    parameters: int
    gmacs: float
    """10⁹ multiply-adds of a forward pass on one image, over its matrix products and convolutions."""
    gmacs_published: float
    """The same with one more token in every self-attention block without a class token.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


def show(arguments: list[str], program: Program) -> None:
    """Print every model at every resolution of the paper, in the order of its table."""
    Options(
        "zoo", "List the paper's models with their size, cost and published accuracy."
    ).parse_args(arguments)
    table = Table(
        title="CaiT: GMACs counted here beside the paper's GFLOPs; top-1 on ImageNet from the paper"
    )
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "model" else "right")
    costs = known_costs()
    for model, published in models().items():
        cost = costs[model]
        cells = [
            *map(str, model),
            f"{cost.parameters:,}",
            f"{cost.gmacs:.3f}",
            f"{cost.gmacs_published:.1f}",
        ]
        top1 = {"model.distillation" in row.settings: row.top1 for row in published}
        for value in (published[0].gflops, top1.get(False), top1.get(True)):
            cells.append("" if value is None else f"{value:.1f}")
        table.add_row(*cells)
    screen = table_console(110)
    screen.print(table)
    screen.print(
        '"N+1 rule": one more token in each self-attention block. The paper seems to count like this.'
    )


def known_costs() -> dict[Model, Cost]:
    costs = {}
    for row in disk.read_rows(Path(__file__).with_name("costs.csv")):
        cost = Cost(int(row["parameters"]), float(row["gmacs"]), float(row["gmacs_published"]))
        costs[row["model"], int(row["img_size"])] = cost
    return costs


def models() -> dict[Model, list[Row]]:
    """The rows of the table of models by model and resolution, without and with distillation."""
    models = defaultdict(list)
    for row in rows().values():
        if row.table == "models":
            models[row.settings["model.name"], row.network().img_size].append(row)
    return models
