"""The LightningModule: steps, metrics and the optimiser around a bare CaiT."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from cait.errors import UserError
from cait.model.cait import create_model
from cait.model.weights import load_pretrained, load_weights
from cait.optim import param_groups, warmup_cosine

Batch = tuple[Tensor, Tensor]


class EvalMetrics(nn.Module):
    """Loss and top-1 / top-5 accuracy in per cent over a whole set, exact over several processes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanMetric()
        # Not grouped: torchmetrics would merge the two for good if they agreed on the first batch.
        self.accuracy = MetricCollection(
            {f"acc{k}": MulticlassAccuracy(num_classes, top_k=min(k, num_classes), average="micro") for k in (1, 5)},
            compute_groups=False,
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes], labels [B]."""
        logits = logits.float()
        self.loss.update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
        self.accuracy.update(logits, labels)

    def compute(self, prefix: str) -> dict[str, Tensor]:
        """The figures under their logged names, as `val/acc1`; starts the count anew."""
        figures = {f"{prefix}/loss": self.loss.compute()}
        figures |= {f"{prefix}/{name}": 100 * value for name, value in self.accuracy.compute().items()}
        self.loss.reset()
        self.accuracy.reset()
        return figures


class CaiTModule(LightningModule):
    """CaiT with AdamW, per-step warm-up and cosine, label smoothing or soft targets.

    Args:
        name: one of the paper's models, as "xxs24"; see `cait.create_model`.
        img_size: side of the images in pixels; the command line takes it from the data.
        num_classes: width of the head; the command line takes it from the data.
        drop_path_rate: stochastic depth; None takes the paper's rate for the model.
        fields: further fields of the network that differ from the model's row, as {"patch_size": 8}.
        weights: file to start from: the release's, timm's, safetensors or a checkpoint of ours. Positions
            are resized and a head of other classes starts anew. A run that is resumed does not read it.
        weights_ema: take the moving average out of that file.
        pretrained: start from timm's published weights of the model instead, fitted in the same way.
        lr: peak learning rate, for `lr_base_size` images a step.
        lr_base_size: the rate is scaled by global batch / lr_base_size, the global batch counting
            processes and accumulation; None takes `lr` as it is.
        warmup_epochs: length of the linear warm-up.
        warmup_lr: rate of the first step, not scaled.
        min_lr: rate at the end of the cosine, not scaled.
        weight_decay: of AdamW; not for biases, norms, LayerScale, position and class embeddings.
        betas: of AdamW.
        eps: of AdamW.
        label_smoothing: ε of (1 - ε) · target + ε / num_classes, for training only.

    Raises:
        UserError: unknown model or field, or a setting out of its range.
    """

    def __init__(
        self,
        name: str = "xxs24",
        img_size: int = 224,
        num_classes: int = 1000,
        drop_path_rate: float | None = None,
        fields: dict[str, Any] | None = None,
        weights: str | None = None,
        weights_ema: bool = False,
        pretrained: bool = False,
        lr: float = 5e-4,
        lr_base_size: int | None = 512,
        warmup_epochs: float = 5,
        warmup_lr: float = 1e-6,
        min_lr: float = 1e-5,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if min(lr, warmup_lr, min_lr, warmup_epochs, weight_decay) < 0:
            raise UserError("lr, warmup_lr, min_lr, warmup_epochs and weight_decay must be at least 0")
        if lr_base_size is not None and lr_base_size < 1:
            raise UserError(f"lr_base_size must be at least 1 or null, got {lr_base_size}")
        for own in {"name", "img_size", "num_classes", "drop_path_rate", "pretrained"} & set(fields or {}):
            raise UserError(f"{own} is a setting beside `fields`, not one of them")
        if pretrained and weights is not None:
            raise UserError(f"start from the published weights (pretrained) or from {weights} (weights), not from both")
        self.save_hyperparameters()
        self.name = name
        self.weights, self.weights_ema, self.pretrained = weights, weights_ema, pretrained
        self._at_start = True
        self.lr, self.lr_base_size = lr, lr_base_size
        self.warmup_epochs, self.warmup_lr, self.min_lr = warmup_epochs, warmup_lr, min_lr
        self.adamw: dict[str, Any] = dict(betas=tuple(betas), eps=eps)
        self.weight_decay = weight_decay
        self.num_classes = num_classes
        self.model = create_model(name, img_size, num_classes, drop_path_rate, **(fields or {}))
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.val_metrics = EvalMetrics(num_classes)
        self.test_metrics = EvalMetrics(num_classes)

    def setup(self, stage: str) -> None:
        self._load_start()

    def _load_start(self) -> None:
        # Once: what was trained since, or came out of a checkpoint, is not to be overwritten.
        if self._at_start and self.trainer.ckpt_path is None:
            notes: list[str] = []
            if self.pretrained:
                notes = load_pretrained(self.model, self.name)
            elif self.weights is not None:
                notes = [self.weights, *load_weights(self.model, self.weights, self.weights_ema)]
            if notes:
                rank_zero_info("weights from " + "; ".join(notes))
        self._at_start = False

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, img_size, img_size] to logits [B, num_classes]."""
        return self.model(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step on images and labels [B] or class probabilities [B, num_classes].

        `train/acc1` counts, under Mixup and CutMix, the class with the larger share.
        """
        images, targets = batch
        logits = self.model(images)
        loss = self.loss(logits, targets)
        heaviest = targets.argmax(dim=1) if targets.ndim == 2 else targets
        acc1 = 100 * (logits.detach().argmax(dim=1) == heaviest).float().mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_dict({"train/loss": loss, "train/acc1": acc1, "lr": rate}, prog_bar=True, on_step=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.val_metrics.update(self.model(images), labels)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute("val"), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.test_metrics.update(self.model(images), labels)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics.compute("test"))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities [B, num_classes] in float32."""
        return self.model(batch[0]).float().softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trainer = self.trainer
        total_steps = trainer.estimated_stepping_batches
        if not math.isfinite(total_steps):
            raise UserError("the cosine needs an end: set --trainer.max_epochs or --trainer.max_steps")
        steps_per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        peak = self.lr
        if self.lr_base_size is not None:
            global_batch = self._global_batch()
            peak *= global_batch / self.lr_base_size
            rank_zero_info(
                f"peak learning rate {peak:.3g} = {self.lr:.3g} × global batch {global_batch} / {self.lr_base_size}"
            )
        groups = param_groups(self.model, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=peak, fused=True, **self.adamw)
        scheduler = warmup_cosine(
            optimizer,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            total_steps=int(total_steps),
            warmup_lr=self.warmup_lr,
            min_lr=self.min_lr,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another network's weights; let AdamW's settings of now win, as the schedule's do."""
        self._at_start = False
        ours, theirs = self.state_dict(), checkpoint["state_dict"]
        for key in [*ours, *theirs]:
            shapes = [tuple(state[key].shape) if key in state else None for state in (ours, theirs)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"the checkpoint is of another network: {key} is {shapes[1] or 'missing'} in it, "
                    f"{shapes[0] or 'missing'} in the configured model"
                )
        for state in checkpoint.get("optimizer_states", ()):
            _, decayed = state["param_groups"]
            decayed["weight_decay"] = self.weight_decay
            for group in state["param_groups"]:
                group.update(self.adamw)

    def _global_batch(self) -> int:
        """Images that go into one optimiser step."""
        loader: Any = self.trainer.train_dataloader
        batch = loader.batch_size or loader.batch_sampler.batch_size
        return batch * self.trainer.world_size * self.trainer.accumulate_grad_batches
