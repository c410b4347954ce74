"""What a CaiT costs: parameters and multiply-adds, without weights or a device.

The networks of the paper's rows are in costs.json, so that `cait zoo` need not wait for torch. After a change of the
network or of a row, write it anew:

    python -m cait.extras.paper.cost
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cait import disk
from cait.model.config import CaiTConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

COSTS = Path(__file__).parent / "costs.json"


@dataclass(frozen=True)
class Cost:
    parameters: int
    gmacs: float
    """10⁹ multiply-adds of a forward pass on one image, over its matrix products and convolutions."""
    gmacs_published: float
    """The same with one more token in every self-attention block.

    This reproduces most of the paper's "FLOPs", though the blocks of CaiT hold no class token.
    """


def cost(config: CaiTConfig) -> Cost:
    """What is written down for a network; it is counted if nothing is."""
    known = _written().get(_key(config))
    return Cost(*known) if known else measure(config)


@functools.cache
def measure(config: CaiTConfig) -> Cost:
    """Count on the meta device, so that the largest model takes no memory.

    The self-attention blocks are alike, so one is counted for all with the same number of tokens.
    """
    import torch
    from torch import nn

    from cait.model.cait import CaiT

    n, depth = config.num_patches, config.depth
    joined = 0 if config.class_token_at is None else depth - config.class_token_at  # blocks with class tokens
    with torch.device("meta"):
        model = CaiT(config).eval().requires_grad_(False)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        alone, one_more, with_class_tokens = (
            _gmacs(model.blocks[0], torch.empty(1, tokens, config.embed_dim))
            for tokens in (n, n + 1, n + config.num_class_tokens)
        )
        model.blocks = nn.Sequential(*(nn.Identity() for _ in range(depth)))
        rest = _gmacs(model, torch.empty(1, config.in_chans, config.img_size, config.img_size))
    gmacs = rest + (depth - joined) * alone + joined * with_class_tokens
    return Cost(parameters, gmacs, rest + depth * one_more)


def _gmacs(module: nn.Module, x: Tensor) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2 / 1e9


def _key(config: CaiTConfig) -> str:
    """The fields of a network that are not the defaults; stochastic depth costs nothing."""
    fields = [each for each in dataclasses.fields(config) if each.name != "drop_path_rate"]
    values = [(each.name, getattr(config, each.name), each.default) for each in fields]
    return " ".join(f"{name}={value}" for name, value, default in values if value != default)


@functools.cache
def _written() -> dict[str, tuple[int, float, float]]:
    return json.loads(COSTS.read_text()) if COSTS.is_file() else {}


def counted() -> str:
    """The text of costs.json, counted now."""
    from cait.extras.paper.rows import rows

    networks = {_key(network): network for network in (row.network() for row in rows().values())}
    counts = {key: dataclasses.astuple(measure(network)) for key, network in sorted(networks.items())}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(count)}" for key, count in counts.items()) + "\n}\n"


if __name__ == "__main__":
    with disk.whole(COSTS) as beside:
        beside.write_text(counted())
