"""Before the first step on a GPU, "auto" measures the backends of attention; a resumed run keeps what it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from cait.extras.fused.measure import Case, Measured, measure, remembered
from cait.model.attention import SelfAttention
from cait.model.config import attention_backends
from cait.model.talking_heads import Backends, Shape


class AttentionChoice(Callback):
    """Settle what "auto" takes for each shape of the network, at the run's batch and precision, on its device.

    Process 0 measures and decides for all. The choice goes into checkpoints, because another backend rounds otherwise:
    a resumed run keeps it where it still runs. On the CPU nothing is measured.

    Args:
        data: its `batch_size` is that of this process.
        measured: gives the times of a layer.
    """

    def __init__(self, data: Any, measured: Callable[[Case], Measured] | None = None) -> None:
        self.data = data
        self.measured = measured or (lambda case: remembered(case, measure))
        self._kept: dict[str, str] = {}
        self._shapes: dict[Shape, Backends] = {}

    @property
    def state_key(self) -> str:
        return "attention"

    def state_dict(self) -> dict[str, str]:
        return dict(self._kept)

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self._kept = dict(state_dict)
        for shape, backends in self._shapes.items():  # of a strategy that reads checkpoints after `on_fit_start`
            self._keep(shape, backends)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        device = trainer.strategy.root_device
        if device.type == "cpu":
            return
        precision: Any = trainer.precision_plugin
        parameters = next(pl_module.parameters()).dtype
        with precision.forward_context(), torch.no_grad():
            layer = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1, device=device, dtype=parameters)
            dtype = layer(torch.zeros(1, 1, device=device, dtype=parameters)).dtype
        self._shapes = shapes(pl_module.model, device.type, dtype)
        for shape, backends in self._shapes.items():
            if self._keep(shape, backends):
                continue
            case = Case(
                shape, self.data.batch_size, pl_module.architecture.compile, parameters, precision.forward_context
            )
            found = trainer.strategy.broadcast(self.measured(case) if trainer.is_global_zero else Measured())
            self._kept[_name(shape)] = found.fastest
            self._keep(shape, backends)
            if trainer.is_global_zero:
                print(f"attention {found}", flush=True)

    def _keep(self, shape: Shape, backends: Backends) -> bool:
        """Take what the run took before, if it still runs."""
        name = self._kept.get(_name(shape), "")
        if name not in attention_backends() or backends.refusal(name, *shape):
            return False
        backends.settled[shape] = name
        return True


def settle(network: Any, device: str, dtype: torch.dtype, images: int, compiled: bool, **more: Any) -> None:
    """Measure for a loop of your own: have "auto" take the fastest for batches of so many images.

    Args:
        dtype: the precision of qkv.
        more: further fields of `Case`.
    """
    for shape, backends in shapes(network, device, dtype).items():
        found = remembered(Case(shape, images, compiled, **more), measure)
        backends.settled[shape] = found.fastest
        print(f"attention {found}", flush=True)


def shapes(network: Any, device: str, dtype: torch.dtype) -> dict[Shape, Backends]:
    """The shapes of the layers of talking heads whose backend is "auto"."""
    found: dict[Shape, Backends] = {}
    layers = [layer for layer in network.modules() if isinstance(layer, SelfAttention)]
    for layer in layers:
        if layer.talking_heads and not layer.cosine and layer.backend == "auto":
            k = layer.qkv.in_features // layer.num_heads
            found |= {Shape(device, dtype, N, layer.num_heads, k): layer.backends for N in sorted(network.token_counts)}
    return found


def _name(shape: Shape) -> str:
    """A shape in checkpoints, as "196 tokens, 4 heads of 48, bfloat16"."""
    return f"{shape.N} tokens, {shape.heads} heads of {shape.k}, {str(shape.dtype).removeprefix('torch.')}"
