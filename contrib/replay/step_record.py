"""Note what the wanted steps of a run do while they are trained again."""

import re
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from cait.errors import UserError
from cait.model.network import precise
from cait.train.losses import BinaryCrossEntropy
from cait.train.module import CaiTModule, whole_tensor
from cait.train.optim import end_after

LAYER = re.compile(r"[^.]+(?:\.\d+)?")
"""The part of a parameter's name that says its layer."""


class KeptRows(DummyLogger):
    """Keep what is logged, by step. Callbacks that want a logger have one, and nothing is written."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.rows.setdefault(step, {}).update(metrics)


class KeptPlan(Callback):
    """Plan the epochs as the run did: `before` of them at first, and `epochs` once `step` steps are done."""

    def __init__(self, before: int, epochs: int, step: int, **_: Any) -> None:
        self.before = before
        self.epochs = epochs
        self.step = step

    def on_train_start(self, trainer: Trainer, pl_module: CaiTModule) -> None:  # type: ignore[override]
        if trainer.global_step <= self.step:
            trainer.fit_loop.max_epochs = self.before
            for config in trainer.lr_scheduler_configs:
                config.scheduler.load_state_dict(config.scheduler.state_dict())
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: CaiTModule) -> None:  # type: ignore[override]
        if trainer.global_step == self.step:
            end_after(self.epochs, trainer)


class StepRecord(Callback):
    """Note the batches, the losses and the gradients of some steps, and stop after them.

    Args:
        start: optimizer steps that are done when training starts.
        wanted: the steps to note; they count from 0, as in metrics.csv.
    """

    def __init__(self, start: int, wanted: range) -> None:
        self.start = start
        self.wanted = wanted
        self.batches: dict[int, list[tuple[int, int]]] = {}
        """(epoch, batch) of each batch of a step."""
        self.gradients: dict[int, dict[str, float]] = {}
        """The norm of the gradient by layer, before clipping, for each step."""
        self.losses: dict[tuple[int, int], Tensor] = {}
        """The labels' loss of each image, [processes, B], by (epoch, batch); only for this package's losses."""

    def on_load_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = False  # it ends after the wanted steps alone

    def on_train_start(self, trainer: Trainer, pl_module: CaiTModule) -> None:  # type: ignore[override]
        if trainer.global_step != self.start:
            raise UserError(
                f"the checkpoint is of step {trainer.global_step}, not {self.start}: it was replaced; "
                "give the same command again"
            )

        @torch.no_grad()
        def note(loss: nn.Module, inputs: tuple[Tensor, Tensor], _: Tensor) -> None:
            if trainer.global_step in self.wanted:
                logits, targets = inputs
                pairs = zip(logits.split(1), targets.split(1), strict=True)
                losses: Any = pl_module.all_gather(
                    torch.stack([loss.forward(*pair) for pair in pairs])
                )
                self.losses[self.batches[trainer.global_step][-1]] = losses.view(
                    -1, len(logits)
                ).cpu()

        if isinstance(pl_module.loss, nn.CrossEntropyLoss | BinaryCrossEntropy):
            pl_module.loss.register_forward_hook(note)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step in self.wanted:
            self.batches.setdefault(trainer.global_step, []).append(
                (trainer.current_epoch, batch_idx)
            )

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: CaiTModule,  # type: ignore[override]
        optimizer: Optimizer,
    ) -> None:
        if trainer.global_step not in self.wanted:
            return
        layers: dict[str, list[Tensor]] = {}
        for name, parameter in pl_module.model.named_parameters():
            if parameter.grad is not None:
                layer = LAYER.findall(name.replace("_orig_mod.", ""))[0]
                layers.setdefault(layer, []).append(precise(parameter.grad))
        scale = pl_module.gradient_scale(optimizer)
        self.gradients[trainer.global_step] = {
            layer: float(whole_tensor(get_total_norm(gradients)) / scale)
            for layer, gradients in layers.items()
        }

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.wanted.stop
