"""The paper's models: what they cost, counted here, beside what the paper says of them."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass

from cait.analysis.cost import measure
from cait.model.config import VARIANTS, variant_config

# Published, by model and resolution: GFLOPs (multiply-adds), top-1 in per cent, top-1 with hard
# distillation; 384 and 448 are fine-tuned from 224. Source: the paper's tables of models.
PUBLISHED: dict[tuple[str, int], tuple[float | None, float | None, float | None]] = {
    ("xxs24", 224): (2.5, 77.6, 78.4),
    ("xxs24", 384): (9.5, 80.4, 80.9),
    ("xxs36", 224): (3.8, 79.1, 79.7),
    ("xxs36", 384): (14.2, 81.8, 82.2),
    ("xs24", 224): (5.4, 81.8, 82.0),
    ("xs24", 384): (19.3, 83.8, 84.1),
    ("xs36", 224): (8.1, 82.6, 82.9),
    ("xs36", 384): (28.8, 84.3, 84.8),
    ("s24", 224): (9.4, 82.7, 83.5),
    ("s24", 384): (32.2, 84.3, 85.1),
    ("s36", 224): (13.9, 83.3, 84.0),
    ("s36", 384): (48.0, 85.0, 85.4),
    ("s48", 224): (18.6, 83.5, 83.9),
    ("s48", 384): (63.8, 85.1, 85.3),
    ("m24", 224): (36.0, 83.4, 84.7),
    ("m24", 384): (116.1, 84.5, 85.8),
    ("m36", 224): (53.7, 83.8, 85.1),
    ("m36", 384): (173.3, 84.9, 86.1),
    ("m48", 224): (None, None, None),
    ("m48", 448): (329.6, None, 86.5),
}


@dataclass(frozen=True)
class ZooRow:
    model: str
    img_size: int
    embed_dim: int
    num_heads: int
    depth: int
    drop_path_rate: float
    layer_scale_init: float
    parameters: int
    gmacs: float
    gmacs_published_rule: float
    gflops_published: float | None
    top1_published: float | None
    top1_distilled_published: float | None


@functools.cache
def zoo() -> tuple[ZooRow, ...]:
    """Every model at every resolution that the paper has it at."""
    rows = []
    for name, img_size in PUBLISHED:
        config = variant_config(name, img_size=img_size)
        cost = measure(config)
        rows.append(
            ZooRow(
                name,
                img_size,
                config.embed_dim,
                config.num_heads,
                config.depth,
                config.drop_path_rate,
                config.epsilon,
                cost.parameters,
                round(cost.gmacs, 3),
                round(cost.gmacs_published, 3),
                *PUBLISHED[name, img_size],
            )
        )
    assert {row.model for row in rows} == set(VARIANTS)
    return tuple(rows)


def show(as_json: bool) -> None:
    """Print the table, or a JSON list of its rows."""
    rows = zoo()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
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
            *("" if figure is None else f"{figure:.1f}" for figure in published),
        )
    # A table that is piped into a file keeps its columns.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table)
    console.print('"N+1 rule": one token more in each self-attention block, which is how the paper seems to count.')
