"""The paper's models: their cost, counted here, beside the paper's own numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cait.extras.paper.cost import measure
from cait.extras.paper.rows import Row, rows
from cait.model.config import variant_config


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
    """Every model at every resolution of the paper, in the order of its table."""
    found: dict[tuple[str, int], dict[bool, Row]] = {}
    for row in rows().values():
        if row.table == "models":
            key = (row.settings["model.name"], row.network().img_size)
            found.setdefault(key, {})["model.distillation" in row.settings] = row
    listed = []
    for (name, img_size), by_distilled in found.items():
        plain, distilled = by_distilled.get(False), by_distilled.get(True)
        config = variant_config(name, img_size=img_size)
        cost = measure(config)
        listed.append(
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
                next(row.gflops for row in by_distilled.values()),
                plain.top1 if plain else None,
                distilled.top1 if distilled else None,
            )
        )
    return tuple(listed)
