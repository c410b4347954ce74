"""The LightningModule: steps, metrics and the optimiser around a bare CaiT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from cait.errors import UserError
from cait.losses import Distillation, Teacher, distillation_loss, timm_teacher
from cait.model.cait import create_model
from cait.model.weights import load_pretrained, load_weights
from cait.optim import param_groups, warmup_cosine

Batch = tuple[Tensor, Tensor]


class SkipStep(Exception):  # noqa: N818  # it is no error
    """Raised from a hook before the optimizer's step: leave weights and optimizer as they are, and go on."""


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
        """Count a batch: logits [B, num_classes], labels [B]; a label below 0 is not counted."""
        counted = labels >= 0
        logits, labels = logits[counted].float(), labels[counted]
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
    """CaiT with AdamW, per-step warm-up and cosine, label smoothing or soft targets, distillation.

    With a teacher the loss is (1 - α) · cross entropy + α · `cait.losses.distillation_loss`, both on the
    one class output, as released, or with the network's field `distillation_token` the second on that
    token's head, as in DeiT. The teacher is no part of checkpoints or of the moving average.

    Args:
        name: one of the paper's models, as "xxs24"; see `cait.create_model`.
        img_size: side of the images in pixels; the command line takes it from the data.
        num_classes: width of the head; the command line takes it from the data.
        drop_path_rate: stochastic depth; None takes the paper's rate for the model.
        fields: further fields of the network that differ from the model's row, as {"patch_size": 8}.
        compile: compile the blocks with torch.compile, see `CaiT.compile_blocks`; the first steps take longer.
        grad_checkpointing: compute the activations of the self-attention blocks again in the backward pass
            instead of keeping them; for the largest models and resolutions.
        weights: file to start from: the release's, timm's, safetensors or a checkpoint of ours. Positions are
            resized. A head of other classes starts anew; from a checkpoint of ours it keeps the classes that
            the data has too, by name. A run that is resumed does not read it.
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
        distillation: "hard" or "soft" adds a teacher to the loss.
        distillation_alpha: α, the teacher's share of the loss.
        distillation_tau: τ, the temperature of soft distillation.
        teacher: timm's name of a model with published weights, or a checkpoint (.ckpt) of a run of ours.
        teacher_path: local file with the weights of the timm model.
        teacher_img_size: side of the images that the teacher sees; None means the student's, or the
            teacher's own where it takes no other.
        mean: of the normalisation that the images have had; the command line takes it from the data.
        std: the same.

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
        compile: bool = False,
        grad_checkpointing: bool = False,
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
        distillation: Distillation = "none",
        distillation_alpha: float = 0.5,
        distillation_tau: float = 1.0,
        teacher: str = "regnety_160.deit_in1k",
        teacher_path: str | None = None,
        teacher_img_size: int | None = None,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if min(lr, warmup_lr, min_lr, warmup_epochs, weight_decay) < 0:
            raise UserError("lr, warmup_lr, min_lr, warmup_epochs and weight_decay must be at least 0")
        if lr_base_size is not None and lr_base_size < 1:
            raise UserError(f"lr_base_size must be at least 1 or null, got {lr_base_size}")
        if not 0 <= distillation_alpha <= 1 or distillation_tau <= 0:
            raise UserError("distillation_alpha must be in [0, 1] and distillation_tau above 0")
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
        self.adamw: dict[str, Any] = dict(betas=tuple(betas), eps=eps, fused=True)
        self.weight_decay = weight_decay
        self.num_classes = num_classes
        self.model = create_model(name, img_size, num_classes, drop_path_rate, **(fields or {}))
        if self.model.config.distillation_token and distillation == "none":
            raise UserError("a distillation_token learns from a teacher alone: set distillation to hard or soft")
        self.compile_blocks, self.model.grad_checkpointing = compile, grad_checkpointing
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.distillation = distillation
        self.distillation_alpha, self.distillation_tau = distillation_alpha, distillation_tau
        self.teacher: Teacher | None = None
        self.grad_norm: Tensor | None = None
        """Of this step, where a callback has computed it; clipping then need not."""
        self.val_metrics = EvalMetrics(num_classes)
        self.test_metrics = EvalMetrics(num_classes)

    def setup(self, stage: str) -> None:
        self._load_start()
        if stage == "fit" and self.compile_blocks:
            self.model.compile_blocks()
        if stage == "fit" and self.distillation != "none":
            # Not registered as a submodule: it is not to be saved, trained, averaged or put into train mode.
            self.__dict__["teacher"] = self._load_teacher()

    def _load_start(self) -> None:
        # Once: what was trained since, or came out of a checkpoint, is not to be overwritten.
        if self._at_start and self.trainer.ckpt_path is None:
            notes: list[str] = []
            if self.pretrained:
                notes = load_pretrained(self.model, self.name)
            elif self.weights is not None:
                notes = [self.weights]
                notes += load_weights(self.model, self.weights, self.weights_ema, self._class_names())
            if notes:
                rank_zero_info("weights from " + "; ".join(notes))
        self._at_start = False

    def _class_names(self) -> list[str] | None:
        """The data's classes; None from bare loaders, and in prediction without the training folder."""
        try:
            return self.trainer.datamodule.class_names  # type: ignore[attr-defined]
        except (AttributeError, UserError):
            return None

    def _load_teacher(self) -> Teacher:
        hparams = self.hparams
        name, path, img_size = hparams["teacher"], hparams["teacher_path"], hparams["teacher_img_size"]
        student = (hparams["mean"], hparams["std"])
        if not name.endswith(".ckpt"):
            return timm_teacher(name, path, self.num_classes, img_size, *student)
        if not Path(name).is_file():
            raise UserError(f"the teacher {name} does not exist")
        try:
            theirs = CaiTModule.load_from_checkpoint(name, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"the teacher {name} is not a whole checkpoint of a run") from error
        if theirs.num_classes != self.num_classes:
            raise UserError(f"the teacher {name} knows {theirs.num_classes} classes, the data has {self.num_classes}")
        own_size = theirs.model.config.img_size
        return Teacher(theirs.model, theirs.hparams["mean"], theirs.hparams["std"], own_size, *student)

    def on_fit_start(self) -> None:
        if self.teacher is not None:
            self.teacher.to(self.device)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, img_size, img_size] to logits [B, num_classes]."""
        return self.model(images.to(self.dtype))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step on images and labels [B] or class probabilities [B, num_classes].

        `train/acc1` counts, under Mixup and CutMix, the class with the larger share; with a distillation
        token it is of the class head alone.
        """
        images, targets = batch
        inputs = images.to(self.dtype)
        heads = self.model.forward_heads(inputs) if self.model.config.distillation_token else (self.model(inputs),)
        logits = _precise(heads[0])
        loss = self.loss(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        if self.teacher is not None:
            judged = distillation_loss(heads[-1], self.teacher(images), self.distillation, self.distillation_tau)
            loss = (1 - self.distillation_alpha) * loss + self.distillation_alpha * judged
        self._log_step(loss.detach(), logits.detach(), targets)
        return loss

    def _log_step(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        # All on the device: a number that is read, or made on the host, would have the host wait for the device.
        heaviest = targets.argmax(dim=1) if targets.ndim == 2 else targets
        acc1 = 100 * (logits.argmax(dim=1) == heaviest).float().mean()
        # For the epoch's line on the screen; metrics.csv has the steps.
        epoch = {"train/loss_epoch": loss, "train/acc1_epoch": acc1}
        self.log_dict(epoch, on_step=False, on_epoch=True, logger=False, sync_dist=True)
        step = torch.stack([loss, acc1.to(loss)])
        if self._is_logged():  # the mean over all processes
            step = self.trainer.strategy.reduce(step, reduce_op="mean")
        rate = torch.full((), self.trainer.optimizers[0].param_groups[0]["lr"], dtype=torch.float32, device=self.device)
        self.log_dict({"train/loss": step[0], "train/acc1": step[1], "lr": rate}, on_step=True)

    def _is_logged(self) -> bool:
        """Whether the figures of this step go to the loggers."""
        trainer = self.trainer
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, also where Lightning refuses to: it takes no fused optimizer under mixed precision.

        Under 16-mixed the gradients of a fused optimizer are still multiplied by the scaler's scale.
        """
        if not gradient_clip_val:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if gradient_clip_algorithm == "value":
            bound = torch.full((), gradient_clip_val, dtype=torch.float32, device=self.device)
            bound = bound * self._gradient_scale(optimizer)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-bound.to(parameter.dtype), bound.to(parameter.dtype))
        else:
            norm = self.gradient_norm(optimizer) if self.grad_norm is None else self.grad_norm
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole gradient, not scaled, in float32 at least; not finite where any part of it is not."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [_precise(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return get_total_norm(gradients) / self._gradient_scale(optimizer)

    def _gradient_scale(self, optimizer: Optimizer) -> Tensor | float:
        """What the gradients of `optimizer` are multiplied by at present."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return 1.0  # Lightning has the scaler unscale those of the others
        return scaler._get_scale_async()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with suppress(SkipStep):
            super().optimizer_step(*args, **kwargs)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Count a batch; its logits [B, num_classes] are for callbacks."""
        images, labels = batch
        logits = self(images)
        self.val_metrics.update(logits, labels)
        return logits

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute("val"), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.test_metrics.update(self(images), labels)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.test_metrics.compute("test"))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities [B, num_classes] in float32."""
        return self(batch[0]).float().softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trainer = self.trainer
        total_steps = trainer.estimated_stepping_batches
        if not math.isfinite(total_steps):
            raise UserError("the cosine needs an end: set --trainer.max_epochs or --trainer.max_steps")
        if trainer.train_dataloader is None:  # Lightning counts no epoch's batches where max_epochs is -1
            trainer.fit_loop.setup_data()
        steps_per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        peak = self.lr
        if self.lr_base_size is not None:
            global_batch = self._global_batch()
            peak *= global_batch / self.lr_base_size
            rank_zero_info(
                f"peak learning rate {peak:.3g} = {self.lr:.3g} × global batch {global_batch} / {self.lr_base_size}"
            )
        groups = param_groups(self.model, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=peak, **self.adamw)
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
        groups = param_groups(self.model, self.weight_decay)
        for state in checkpoint.get("optimizer_states", ()):
            sizes = [[len(group["params"]) for group in side] for side in (groups, state["param_groups"])]
            if sizes[0] != sizes[1]:
                raise UserError(
                    f"the checkpoint's optimiser has groups of {sizes[1]} parameters, this one of {sizes[0]}; "
                    "start a new run from its weights with --model.weights"
                )
            for group, own in zip(state["param_groups"], groups, strict=True):
                group.update(self.adamw, weight_decay=own["weight_decay"])

    def _global_batch(self) -> int:
        """Images that go into one optimiser step."""
        loader: Any = self.trainer.train_dataloader
        batch = loader.batch_size or loader.batch_sampler.batch_size
        return batch * self.trainer.world_size * self.trainer.accumulate_grad_batches


def _precise(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
