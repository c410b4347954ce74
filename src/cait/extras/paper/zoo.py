"""`cait zoo`: the paper's models, their cost as counted here beside the paper's own numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from cait.cli.options import Options
from cait.errors import table_console
from cait.extras.paper.rows import Row, rows
from cait.model.cait import CaiT
from cait.model.config import CaiTConfig
from cait.run.program import Program

COLUMNS = ("model", "pixels", "parameters", "GMACs", "N+1 rule", "paper", "top-1", "distilled")


class Cost(NamedTuple):
    """What a CaiT costs, counted on the meta device, so that the largest model takes no memory."""

    parameters: int
    gmacs: float
    """10⁹ multiply-adds of a forward pass on one image, over its matrix products and convolutions."""
    gmacs_published: float
    """The same with one more token in every self-attention block without a class token.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


def show(arguments: list[str], program: Program) -> None:
    """Print every model at every resolution of the paper, in the order of its table."""
    Options("zoo", "List the paper's models with their size, cost and published accuracy.").parse_args(arguments)
    table = Table(title="CaiT: GMACs counted here beside the paper's GFLOPs; top-1 on ImageNet from the paper")
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "model" else "right")
    for (name, img_size), found in models().items():
        counts = cost(found[0].network())
        top1 = {"model.distillation" in row.settings: row.top1 for row in found}
        counted = (f"{counts.parameters:,}", f"{counts.gmacs:.3f}", f"{counts.gmacs_published:.1f}")
        published = (found[0].gflops, top1.get(False), top1.get(True))
        table.add_row(name, str(img_size), *counted, *("" if value is None else f"{value:.1f}" for value in published))
    screen = table_console(110)
    screen.print(table)
    screen.print('"N+1 rule": one more token in each self-attention block. The paper seems to count like this.')


def models() -> dict[tuple[str, int], list[Row]]:
    """The rows of the table of models by model and resolution, without and with distillation."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows().values():
        if row.table == "models":
            found.setdefault((row.settings["model.name"], row.network().img_size), []).append(row)
    return found


def cost(config: CaiTConfig) -> Cost:
    """Count the parameters and multiply-adds of a network."""
    with torch.device("meta"):
        model = CaiT(config).eval().requires_grad_(False)
        gmacs = _gmacs(model, torch.empty(1, config.in_chans, config.img_size, config.img_size))
        patches, one_more = (torch.empty(1, config.num_patches + more, config.embed_dim) for more in (0, 1))
        token = _gmacs(model.blocks[0], one_more) - _gmacs(model.blocks[0], patches)
    without_token = config.depth if config.class_token_at is None else config.class_token_at
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, gmacs, gmacs + without_token * token)


def _gmacs(module: Any, x: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2e9
