"""An exponential moving average of the weights, beside the weights and never in their place."""

from __future__ import annotations

from collections.abc import Collection
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

    It averages all floating-point numbers that a checkpoint has of the network, as timm's ModelEmaV3 does: running
    statistics of BatchNorm too, because those of the raw weights do not fit averaged ones. It starts from the initial
    weights, and is kept and scored in float32 at least, because bfloat16 would round its small steps away. Nothing is
    ever swapped: every other part sees the raw weights.

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
        if self.average is not None and trainer.world_size > 1:
            # Each process has statistics of its own images. Those of process 0 are saved, and count as they do in DDP.
            for name in sorted(self._buffers):
                buffer = self.average.get_buffer(name)
                torch.distributed.broadcast(first := buffer.contiguous(), 0)
                buffer.copy_(first)

    def _start(self, pl_module: Any) -> None:
        if self.decay is None:
            return
        self._dtype = torch.promote_types(pl_module.dtype, torch.float32)
        network = pl_module.model
        # One that is sharded cannot be deep-copied and brings a method for it.
        average = network.copy_sharded() if hasattr(network, "copy_sharded") else deepcopy(network)
        self.average = average._apply(_precise).eval().requires_grad_(False)
        self._buffers = averaged_buffers(network)
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
            update(self.average, pl_module.model, self.decay, self._buffers)

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
def update(average: nn.Module, model: nn.Module, decay: float, buffers: Collection[str] = ()) -> None:
    """average ← decay · average + (1 - decay) · weights, all tensors at once, also for `buffers`; others are copied."""
    means: list[Tensor] = list(average.parameters())
    weights: list[Tensor] = list(model.parameters())
    for (name, mean), (_, buffer) in zip(average.named_buffers(), model.named_buffers(), strict=True):
        if name in buffers:
            means.append(mean)
            weights.append(buffer)
        else:
            mean.copy_(buffer)
    means, weights = list(map(_local_part, means)), list(map(_local_part, weights))
    weights = [weight.to(mean.dtype) for mean, weight in zip(means, weights, strict=True)]
    torch._foreach_lerp_(means, weights, 1 - decay)


def averaged_buffers(network: nn.Module) -> set[str]:
    """The buffers to average: floating-point numbers that checkpoints hold. Infinities, as of a mask, would be NaN."""
    saved = network.state_dict().keys()
    floats = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}
    return {name for name, buffer in floats.items() if name in saved and buffer.isfinite().all()}


def _precise(tensor: Tensor) -> Tensor:
    """In float32 at least; other numbers than floating-point ones as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def _local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory: all of it, except of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
