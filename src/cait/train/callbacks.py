"""Callbacks of every run: random numbers by the step, and an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from cait import ckpt, seeds
from cait.ckpt import Checkpoint, State
from cait.data.dataset import seed_generators
from cait.errors import UserError, one_line
from cait.settings import In
from cait.train.module import SAME, share_buffers

DECAY = In("[0, 1)")
NEAR = 0.95
"""A moving average with less than this share of the raw weights' accuracy is far behind."""


class StepSeed(Callback):
    """What a step draws as a function of (seed, epoch, step, process), so a resumed run draws the same.

    It seeds the global generators of torch, numpy and `random`: for dropout, stochastic depth, and whatever a network,
    a loss, a step or a callback of the user's own draws. Put it before callbacks that draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed_step(trainer, trainer.current_epoch, -1)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seed_step(trainer, trainer.current_epoch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._seed_step(trainer, -1 - trainer.global_step, batch_idx)  # no epoch is below 0

    def _seed_step(self, trainer: Trainer, epoch: int, step: int) -> None:
        seed = seeds.training_step(self.seed, epoch, step, trainer.global_rank)
        seed_generators(seed, trainer.strategy.root_device.type)


class EMA(Callback):
    """Average `module.model` after every optimizer step, beside the weights; score the average as `val_ema/...`.

    timm's ModelEmaV3 averages all floating-point numbers that a checkpoint has of the network: running statistics of
    BatchNorm too, because those of the raw weights do not fit averaged ones. It starts from the initial weights, and is
    kept in float32 at least. Nothing is ever swapped: every other part sees the raw weights.
    By default it chooses best.ckpt, and verbs then use it, see `cait.ckpt.uses_average`.

    Args:
        decay: share of the average that each step keeps, in [0, 1); None turns the average off.
    """

    def __init__(self, decay: float | None = None) -> None:
        DECAY.check("decay", decay)
        self.decay = decay
        self.average: nn.Module | None = None
        self.logits: Tensor | None = None
        """The average's logits of the batch that is being validated, [B, num_classes]."""
        self._loaded: State = {}
        self._last_step = 0

    @classmethod
    def among(cls, callbacks: Iterable[Any]) -> EMA | None:
        """The first moving average among a Trainer's callbacks, if there is one."""
        return next((callback for callback in callbacks if isinstance(callback, cls)), None)

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
            share_buffers(self.average)

    def _start(self, pl_module: Any) -> None:
        if self.decay is None:
            return
        weights = pl_module.model
        dtype = torch.promote_types(pl_module.dtype, torch.float32)
        # timm averages all tensors by one operation, which takes no mixture of sharded and other tensors.
        is_uniform = len(set(map(type, weights.state_dict().values()))) == 1
        to_dtype = None if dtype == pl_module.dtype else dtype
        self._averaging = ModelEmaV3(weights, self.decay, dtype=to_dtype, foreach=is_uniform)
        self.average = self._averaging.module.requires_grad_(False)
        if self._loaded:
            self._restore(self.average, pl_module.trainer.ckpt_path)
        self.metrics = pl_module.new_metrics().to(pl_module.device)

    def _restore(self, average: nn.Module, path: Any) -> None:
        try:
            average.load_state_dict(self._loaded)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"the moving average in {path} cannot be used: {one_line(error)[:200]}"
            ) from error
        self._loaded = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        # not while gradients accumulate
        if self.average is not None and trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._averaging.update(pl_module.model)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self.average is None:
            return
        images, labels = batch
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            self.logits = pl_module.logits(images, self.average)
            self.metrics.update(self.logits, labels)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.average is not None:
            pl_module.log_dict(self.metrics.compute(ckpt.VAL_EMA), **SAME)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Say so if the average is far behind: its decay is too large for so few steps."""
        if self.decay is None:
            return
        name = pl_module.task.metric
        prefixes = (ckpt.VAL_EMA, ckpt.VAL)
        average, raw = (
            float(trainer.callback_metrics.get(f"{prefix}/{name}", math.nan)) for prefix in prefixes
        )
        if average < NEAR * raw:
            rank_zero_info(
                f"warning: the moving average is far behind: {name} is {average:.4g}, "
                f"of the raw weights {raw:.4g}; take a smaller --ema.decay"
            )

    def state_dict(self) -> State:
        return self.average.state_dict() if self.average is not None else {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Checkpoint) -> None:
        if trainer.state.fn != "fit":
            # Those of the weights that were scored before.
            self.average = None
            self._loaded = {}

    def load_state_dict(self, state_dict: State) -> None:
        self._loaded = state_dict
