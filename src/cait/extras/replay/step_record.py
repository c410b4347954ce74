"""Note what the wanted steps of a run do while they are trained again."""

from __future__ import annotations

import re
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from cait.errors import UserError
from cait.train.losses import BinaryCrossEntropy
from cait.train.module import CaiTModule, precise, whole_tensor

LAYER = re.compile(r"[^.]+(?:\.\d+)?")


class KeptRows(DummyLogger):
    """Keep what is logged, by step. Callbacks that want a logger have one, and nothing is written."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.rows.setdefault(step, {}).update(metrics)


class StepRecord(Callback):
    """Note the batches, the losses and the gradients of some steps, and stop after them.

    Args:
        start: optimizer steps that are done when training starts.
        first: the first step to note; steps count from 0, as in metrics.csv.
        last: the last step.
    """

    def __init__(self, start: int, first: int, last: int) -> None:
        self.start, self.first, self.last = start, first, last
        self.batches: dict[int, list[tuple[int, int]]] = {}
        """(epoch, batch) of each batch of a step."""
        self.gradients: dict[int, dict[str, float]] = {}
        """The norm of the gradient by layer, before clipping, for each step."""
        self.losses: dict[tuple[int, int], Tensor] = {}
        """The labels' loss of each image, [processes, B], by (epoch, batch); only for this package's losses."""

    def _is_wanted(self, trainer: Trainer) -> bool:
        return self.first <= trainer.global_step <= self.last

    def on_train_start(self, trainer: Trainer, pl_module: CaiTModule) -> None:  # type: ignore[override]
        if trainer.global_step != self.start:
            raise UserError(
                f"the checkpoint is of step {trainer.global_step}, not {self.start}: it was replaced; "
                "give the same command again"
            )
        if isinstance(pl_module.loss, nn.CrossEntropyLoss | BinaryCrossEntropy):
            pl_module.loss.register_forward_hook(self._note_losses)
        self._trainer, self._module = trainer, pl_module

    def on_train_batch_start(self, trainer: Trainer, pl_module: CaiTModule, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        if self._is_wanted(trainer):
            self.batches.setdefault(trainer.global_step, []).append((trainer.current_epoch, batch_idx))

    @torch.no_grad()
    def _note_losses(self, loss: nn.Module, given: tuple[Tensor, Tensor], _: Tensor) -> None:
        if self._is_wanted(self._trainer):
            pairs = zip(*(part.split(1) for part in given), strict=True)
            losses_B = torch.stack([loss.forward(*pair) for pair in pairs])
            of_all = self._module.all_gather(losses_B)
            assert isinstance(of_all, Tensor)
            self.losses[self.batches[self._trainer.global_step][-1]] = of_all.view(-1, len(losses_B)).cpu()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: CaiTModule, optimizer: Optimizer) -> None:  # type: ignore[override]
        if self._is_wanted(trainer):
            layers: dict[str, list[Tensor]] = {}
            for name, parameter in pl_module.model.named_parameters():
                if parameter.grad is not None:
                    layer = LAYER.match(name.replace("_orig_mod.", ""))
                    assert layer is not None
                    layers.setdefault(layer[0], []).append(precise(parameter.grad))
            scale = pl_module.gradient_scale(optimizer)
            self.gradients[trainer.global_step] = {
                layer: float(whole_tensor(get_total_norm(gradients)) / scale) for layer, gradients in layers.items()
            }

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step > self.last
