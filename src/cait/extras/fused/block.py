"""Time a block with and without torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cait.extras.fused.measure import Measured, Step, in_a_line, milliseconds, settle, versions
from cait.model.cait import CaiT
from cait.model.config import CaiTConfig


@dataclass(frozen=True)
class BlockCase:
    """A block of self-attention as it will train."""

    config: CaiTConfig
    device: torch.device
    images: int
    """In a batch of this process."""
    parameters: torch.dtype
    dtype: torch.dtype
    """What the linear layers give; with autocast it is not that of the parameters."""
    context: Callable[[], AbstractContextManager[Any]] = field(compare=False)
    """The Trainer's context of a forward pass."""

    @property
    def key(self) -> tuple[Any, ...]:
        return *versions(self.device.type), self.config, self.images, self.parameters, self.dtype


def measure(case: BlockCase, clock: Callable[[Step, torch.device], float] = milliseconds) -> Measured:
    """Time a block both ways. Compiling it takes up to a minute; the run's own start then takes it from the cache."""
    found, cuda = Measured(part="block", otherwise="plain"), case.device.type == "cuda"
    with torch.random.fork_rng([case.device] if cuda else []):  # the run's draws stay the same
        for name in ("plain", "compiled"):
            try:
                found.ms[name] = clock(_step(case, name == "compiled"), case.device)
            except Exception as failure:  # no compiler, too little memory: train without it
                found.left_out[name] = in_a_line(failure)
    torch._dynamo.reset()  # a resumed run does not measure: both shall compile alike
    torch.cuda.empty_cache() if cuda else None
    return found


def _step(case: BlockCase, compiled: bool) -> Step:
    """A forward and a backward pass of the block, with the draws of stochastic depth."""
    config, on = replace(case.config, depth=1), (case.device, case.parameters)
    network = CaiT(config).to(*on).train()
    if case.device.type != "cpu":  # each way with the attention that is the fastest there
        more: dict[str, Any] = dict(parameters=case.parameters, context=case.context)
        settle(network, case.device.type, case.dtype, case.images, compiled, **more)
    if compiled:
        network.compile_blocks()
    block = network.blocks[0]
    x = torch.randn(case.images, max(network.token_counts), config.embed_dim).to(*on).requires_grad_()
    d_out = torch.randn_like(x)

    def step() -> None:
        with torch.enable_grad(), case.context():
            out = block(x)
        torch.autograd.grad(out, [x, *block.parameters()], d_out.to(out.dtype), allow_unused=True)

    return step
