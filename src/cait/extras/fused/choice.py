"""Before the first step "auto" measures attention on a GPU, and torch.compile; a resumed run keeps what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from cait.errors import UserError
from cait.extras.fused.measure import Case, Measured, measure, remembered, shapes
from cait.model.cait import Block
from cait.model.config import CaiTConfig, attention_backends
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
        compiled, context = pl_module.architecture.compile, trainer.precision_plugin.forward_context
        parameters, dtype = precisions(trainer, pl_module)
        self._shapes = shapes(pl_module.model, device.type, dtype)
        for shape, backends in self._shapes.items():
            if self._keep(shape, backends):
                continue
            case = Case(shape, self.data.batch_size, compiled, parameters, context)
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


class CompileChoice(Callback):
    """Settle `--model.compile auto`. Process 0 measures and decides for all.

    The choice goes into checkpoints, because compiled code rounds otherwise: a resumed run keeps it.

    Args:
        data: its `batch_size` is that of this process.
        measured: gives the times of a `cait.extras.fused.block.BlockCase`.
    """

    def __init__(self, data: Any, measured: Callable[[Any], Measured] | None = None) -> None:
        self.data, self.measured = data, measured
        self._kept: str | None = None
        self._module: Any = None

    @property
    def state_key(self) -> str:
        return "compile"

    def state_dict(self) -> dict[str, str]:
        return {"taken": self._kept} if self._kept else {}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self._kept = state_dict.get("taken")
        if self._module is not None:  # of a strategy that reads checkpoints after `on_fit_start`
            self._apply()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.architecture.compile != "auto":
            return
        self._module = pl_module
        if self._kept is None:
            from cait.extras.fused import block

            if not isinstance(config := getattr(pl_module.model, "config", None), CaiTConfig):
                raise UserError("model.compile auto times a block of a CaiT; for other networks say true or false")
            on, context = trainer.strategy.root_device, trainer.precision_plugin.forward_context
            case = block.BlockCase(config, on, self.data.batch_size, *precisions(trainer, pl_module), context)
            make = self.measured or (lambda case: remembered(case, block.measure))
            found = trainer.strategy.broadcast(make(case) if trainer.is_global_zero else Measured())
            self._kept = found.fastest
            if trainer.is_global_zero:
                print(f"compile   {found}", flush=True)
        self._apply()

    def _apply(self) -> None:
        """Compile the network or not, and say so to the callbacks that come later."""
        module, compiled = self._module, self._kept == "compiled"
        module.architecture = replace(module.architecture, compile=compiled)
        if compiled:
            module.model.compile_blocks()
        else:
            for block in module.model.modules():
                if isinstance(block, Block):
                    block.run = type(block).body


def precisions(trainer: Trainer, pl_module: Any) -> tuple[torch.dtype, torch.dtype]:
    """Of the parameters, and of what the linear layers give."""
    device, parameters = trainer.strategy.root_device, next(pl_module.parameters()).dtype
    with trainer.precision_plugin.forward_context(), torch.no_grad():
        layer = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1, device=device, dtype=parameters)
        return parameters, layer(torch.zeros(1, 1, device=device, dtype=parameters)).dtype


def _name(shape: Shape) -> str:
    """A shape in checkpoints, as "196 tokens, 4 heads of 48, bfloat16"."""
    return f"{shape.N} tokens, {shape.heads} heads of {shape.k}, {str(shape.dtype).removeprefix('torch.')}"
