"""An exponential moving average of the weights, beside the weights and never in their place."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from cait import ckpt
from cait.errors import UserError, one_line


class EMA(Callback):
    """Average `module.model` after every optimizer step; score the average as `val_ema/...`.

    It starts from the initial weights, as timm's ModelEma does, and is kept and scored in float32 at least, because
    bfloat16 would round its small steps away. Nothing is ever swapped: every other part sees the raw weights.

    Args:
        decay: share of the average that each step keeps; None turns the average off.
    """

    def __init__(self, decay: float | None = None) -> None:
        if decay is not None and not 0 <= decay < 1:
            raise UserError(f"ema.decay must be in [0, 1) or null, got {decay}")
        self.decay = decay
        self.average: nn.Module | None = None
        self.logits: Tensor | None = None
        """The average's logits of the batch that is being validated, [B, num_classes]."""
        self._loaded: dict[str, Any] = {}
        self._last_step = 0

    @property
    def state_key(self) -> str:
        """The key in checkpoints, the same for a subclass."""
        return ckpt.EMA

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._start(pl_module)
        if self.decay is None and self._loaded:
            rank_zero_info("ema.decay is null: the moving average in the checkpoint is given up")

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.average is None and self._loaded:  # a checkpoint is scored
            self._start(pl_module)

    def _start(self, pl_module: Any) -> None:
        if self.decay is None:
            return
        self._dtype = torch.promote_types(pl_module.dtype, torch.float32)
        network = pl_module.model
        # One that is sharded cannot be deep-copied and brings a method for it.
        average = network.copy_sharded() if hasattr(network, "copy_sharded") else deepcopy(network)
        self.average = average.to(self._dtype).eval().requires_grad_(False)
        if self._loaded:
            try:
                self.average.load_state_dict(self._loaded)
            except (RuntimeError, TypeError) as error:
                path = f"the moving average in {pl_module.trainer.ckpt_path}"
                raise UserError(f"{path} cannot be used: {one_line(error)[:200]}") from error
            self._loaded = {}
        self.metrics = pl_module.new_metrics().to(pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self.average is not None and trainer.global_step != self._last_step:  # not while gradients accumulate
            self._last_step = trainer.global_step
            assert self.decay is not None
            update(self.average, pl_module.model, self.decay)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if self.average is not None:
            images, labels = batch
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                self.logits = self.average(images.to(self._dtype))
                self.metrics.update(self.logits, labels)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.average is not None:
            pl_module.log_dict(self.metrics.compute("val_ema"))

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict() if self.average is not None else {}

    def on_load_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self.average, self._loaded = None, {}  # those of the weights that were scored before

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


@torch.no_grad()
def update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 - decay) · weights, all tensors at once; buffers are copied."""
    means = [_local_part(mean) for mean in average.parameters()]
    weights = [_local_part(weight) for weight in model.parameters()]
    weights = [weight.to(mean.dtype) for mean, weight in zip(means, weights, strict=True)]
    torch._foreach_lerp_(means, weights, 1 - decay)
    for buffer, copied in zip(average.buffers(), model.buffers(), strict=True):
        buffer.copy_(copied)


def _local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory: all of it, except of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
