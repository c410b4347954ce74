"""`cait zoo`: the paper's models, their cost as counted here beside the paper's own numbers."""

from __future__ import annotations

import json
import sys
from typing import Any

from cait.cli.options import Options
from cait.errors import console
from cait.run.program import Program


def show(arguments: list[str], program: Program) -> None:
    """Print the models as a table or as a JSON list."""
    options = Options("zoo", "List the paper's models with their size, cost and published accuracy.")
    options.add_argument("--json", action="store_true", help="print a JSON list")
    given, models = options.parse_args(arguments), zoo()
    if given.json:
        print(json.dumps(models, indent=1))
    else:
        _print(models)


def zoo() -> list[dict[str, Any]]:
    """Every model at every resolution of the paper, in the order of its table."""
    from cait.extras.paper.cost import cost
    from cait.extras.paper.rows import Row, rows
    from cait.model.config import variant_config

    models: dict[tuple[str, int], list[Row]] = {}
    for row in rows().values():
        if row.table == "models":
            models.setdefault((row.settings["model.name"], row.network().img_size), []).append(row)
    listed = []
    for (name, img_size), found in models.items():
        top1 = {"model.distillation" in row.settings: row.top1 for row in found}
        config = variant_config(name, img_size=img_size)
        counts = cost(config)
        listed.append(
            {
                "model": name,
                "img_size": img_size,
                "embed_dim": config.embed_dim,
                "num_heads": config.num_heads,
                "depth": config.depth,
                "drop_path_rate": config.drop_path_rate,
                "layer_scale_init": config.epsilon,
                "parameters": counts.parameters,
                "gmacs": round(counts.gmacs, 3),
                "gmacs_published_rule": round(counts.gmacs_published, 3),
                "gflops_published": found[0].gflops,
                "top1_published": top1.get(False),
                "top1_distilled_published": top1.get(True),
            }
        )
    return listed


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="CaiT: GMACs counted here beside the paper's GFLOPs; top-1 on ImageNet from the paper")
    for title in ("model", "pixels", "parameters", "GMACs", "N+1 rule", "paper", "top-1", "distilled"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        published = (row["gflops_published"], row["top1_published"], row["top1_distilled_published"])
        table.add_row(
            row["model"],
            str(row["img_size"]),
            f"{row['parameters']:,}",
            f"{row['gmacs']:.3f}",
            f"{row['gmacs_published_rule']:.1f}",
            *("" if value is None else f"{value:.1f}" for value in published),
        )
    # A table that is piped into a file keeps its columns.
    screen = console(width=None if sys.stdout.isatty() else 110)
    screen.print(table)
    screen.print('"N+1 rule": one more token in each self-attention block. The paper seems to count like this.')
