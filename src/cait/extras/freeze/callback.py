"""Freeze the network of a run before its optimizer is built, and keep what is frozen as it is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from cait import references


class Freeze(Callback):
    """Does nothing unless the LightningModule's settings `freeze` or `head_lr_factor` are given."""

    def __init__(self) -> None:
        self.frozen: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Freeze. The network has been built, and its weights, shards and optimizer come later."""
        factor, what = (pl_module.hparams.get(name) for name in ("head_lr_factor", "freeze"))
        if stage != "fit" or not (factor or what):
            return
        from cait.extras.freeze import parts  # here, so that other runs do not load it

        if factor is not None:
            parts.head(pl_module.model, pl_module.name, "model.head_lr_factor")
            pl_module.model.head_lr_factor = factor
        if what:
            parts.freeze(pl_module.model, pl_module.name, what)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not (what := pl_module.hparams.get("freeze")):
            return
        from cait.extras.freeze import parts

        network, start = pl_module.model, pl_module.initial_weights
        self.frozen = list(parts.frozen_parts(network, what is True))
        weights = list(network.parameters())
        count = sum(weight.numel() for weight in weights if not weight.requires_grad)
        rank_zero_info(f"frozen: {count:,} of {sum(weight.numel() for weight in weights):,} parameters")
        begins_anew = trainer.ckpt_path is None and start.weights is None and not start.pretrained
        if begins_anew and not references.is_path(pl_module.name):  # a network of one's own may load its weights
            remedy = "give --model.weights FILE or --model.pretrained true"
            rank_zero_info(f"warning: the frozen weights are random, because the run starts from none; {remedy}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for part in self.frozen:  # in each step, because others put the whole network into training
            if part.training:
                part.eval()
