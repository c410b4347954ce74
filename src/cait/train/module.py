"""The LightningModule: steps, metrics and the optimizer around a bare network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from cait import ckpt, disk
from cait.errors import UserError
from cait.model import network
from cait.model.config import VARIANTS
from cait.model.recompute import precise
from cait.model.weights import load_pretrained, load_weights
from cait.run import rundir
from cait.train.losses import Distillation, WeightedCrossEntropy, balanced_weights, build_loss, distillation_loss
from cait.train.metrics import EvalMetrics
from cait.train.optim import build_optimizer, warmup_cosine
from cait.train.prediction import Predicts
from cait.train.teacher import Teacher, load_teacher

Batch = tuple[Tensor, Tensor]
ClassWeights = Literal["balanced"]


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, also of a DTensor. All processes must call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class SkipStep(Exception):  # noqa: N818  # it is no error
    """Raised from a hook before the optimizer's step: leave weights and optimizer as they are and go on."""


class CaiTModule(Predicts, LightningModule):
    """A network with its optimizer, per-step warm-up and cosine, label smoothing or soft targets, distillation.

    With a teacher the loss is (1 - α) · loss of the labels + α · `cait.train.losses.distillation_loss`. Both
    read the same class output, as released. With the network's field `distillation_token` the second reads that
    token's head, as in DeiT. Neither checkpoints nor the moving average include the teacher.

    Args:
        name: one of the paper's models, as "xxs24"; a timm model, as "timm/vit_small_patch16_224"; or
            "package.module:factory" of your own. See `cait.model.network.build`.
        img_size: side of the images in pixels; the command line takes it from the data.
        num_classes: width of the head; the command line takes it from the data.
        drop_path_rate: stochastic depth; None takes the paper's rate for the model, or the network's own.
        fields: further arguments of the network, as {"patch_size": 8}; for the paper's models the fields of
            `cait.model.config.CaiTConfig`.
        compile: compile the blocks with torch.compile, see `CaiT.compile_blocks`; the first steps take longer.
        grad_checkpointing: compute activations again in the backward pass instead of saving them; for the
            largest models and resolutions.
        weights: file to start from: the release's, timm's, safetensors or a checkpoint of ours; see
            `cait.model.weights.load_weights`. A run that is resumed does not read it.
        weights_ema: take the moving average out of that file.
        pretrained: start from timm's published weights of the model instead.
        loss: of the labels: "cross_entropy", "bce", or "package.module:factory"; see `cait.train.losses.build_loss`.
        label_smoothing: ε of (1 - ε) · target + ε / num_classes, for training only.
        class_weights: "balanced" weights the images in the cross entropy in inverse ratio to the sizes of their
            classes; None counts all images alike. `data.balance` is the other way.
        optimizer: "adamw", one of timm's such as "lamb", or "package.module:factory"; see `cait.train.optim`.
        optimizer_args: further arguments of the optimizer, as {"momentum": 0.95}.
        layer_decay: scale the rate of each layer by this factor once for each layer above it; None does not.
        lr: peak learning rate, for `lr_base_size` images a step.
        lr_base_size: scale the rate by global batch / lr_base_size, where the global batch counts
            processes and accumulation; None takes `lr` as it is.
        warmup_epochs: length of the linear warm-up.
        warmup_lr: rate of the first step, not scaled.
        min_lr: rate at the end of the cosine, not scaled.
        weight_decay: not for biases, norms, LayerScale, position and class embeddings.
        betas: of AdamW.
        eps: of AdamW.
        metrics: further metrics of validation and test by name, as
            {"f1": "torchmetrics.classification:MulticlassF1Score"}; see `cait.train.metrics.EvalMetrics`.
        per_class: log val/acc1_macro, the mean of the classes' recalls, and write those of the last validation to
            per_class.csv in the folder of the run.
        distillation: "hard" or "soft" adds a teacher to the loss.
        distillation_alpha: α, the teacher's share of the loss.
        distillation_tau: τ, the temperature of soft distillation.
        teacher: a checkpoint (.ckpt) of a run, or any name that `name` takes; timm's may come without "timm/".
        teacher_path: file with the teacher's weights; None takes the published ones.
        teacher_fields: further arguments of the teacher's network.
        teacher_img_size: side of the images that the teacher sees; None means the student's, or the
            teacher's own where it takes no other.
        mean: of the normalisation that the images have had; the command line takes it from the data.
        std: the same.

    Raises:
        UserError: a model, field, loss, optimizer or metric that does not exist, or a setting out of its range.
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
        loss: str = "cross_entropy",
        label_smoothing: float = 0.1,
        class_weights: ClassWeights | None = None,
        optimizer: str = "adamw",
        optimizer_args: dict[str, Any] | None = None,
        layer_decay: float | None = None,
        lr: float = 5e-4,
        lr_base_size: int | None = 512,
        warmup_epochs: float = 5,
        warmup_lr: float = 1e-6,
        min_lr: float = 1e-5,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        metrics: dict[str, str] | None = None,
        per_class: bool = False,
        distillation: Distillation = "none",
        distillation_alpha: float = 0.5,
        distillation_tau: float = 1.0,
        teacher: str = "regnety_160.deit_in1k",
        teacher_path: str | None = None,
        teacher_fields: dict[str, Any] | None = None,
        teacher_img_size: int | None = None,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        numbers = dict(
            lr=lr, warmup_lr=warmup_lr, min_lr=min_lr, warmup_epochs=warmup_epochs, weight_decay=weight_decay
        )
        if wrong := [f"{key} must be at least 0, got {value}" for key, value in numbers.items() if value < 0]:
            raise UserError("; ".join(wrong))
        if lr_base_size is not None and lr_base_size < 1:
            raise UserError(f"lr_base_size must be at least 1 or null, got {lr_base_size}")
        if layer_decay is not None and not 0 < layer_decay <= 1:
            raise UserError(f"layer_decay must be above 0 and at most 1, or null; got {layer_decay}")
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
        self.num_classes = num_classes
        self.model = network.build(name, img_size, num_classes, drop_path_rate, **(fields or {}))
        self.has_distillation_head = network.has_distillation_head(self.model)
        if self.has_distillation_head and distillation == "none" and hasattr(self.model, "forward_heads"):
            raise UserError("a distillation_token learns from a teacher alone: set distillation to hard or soft")
        if self.has_distillation_head and distillation != "none":
            network.train_distillation_head(self.model)
        if grad_checkpointing:
            network.set_grad_checkpointing(self.model, name)
        self.compile_blocks = compile
        if compile:
            network.require(self.model, name, "compile_blocks", "model.compile true")
        self.optimizer_settings: dict[str, Any] = dict(
            name=optimizer, weight_decay=weight_decay, layer_decay=layer_decay, betas=betas, eps=eps
        )
        self.optimizer_settings["arguments"] = dict(optimizer_args or {})
        build_optimizer(self.model, lr=lr, **self.optimizer_settings)  # a wrong setting fails here, not later
        if name not in VARIANTS:
            network.check(self.model, name, network.input_shape(self.hparams), num_classes)
        if class_weights is not None and (class_weights != "balanced" or loss != "cross_entropy"):
            raise UserError(f"class_weights is balanced or null, with the loss cross_entropy; got {class_weights!r}")
        self.class_weights, self.label_smoothing = class_weights, label_smoothing
        self.loss = build_loss(loss, label_smoothing)
        self.distillation = distillation
        self.distillation_alpha, self.distillation_tau = distillation_alpha, distillation_tau
        self.teacher: Teacher | None = None
        self.grad_norm: Tensor | None = None
        """The norm in this step, if a callback has computed it; clipping then uses it."""
        self._accumulated: tuple[int, list[Tensor]] = (-1, [])
        """A step, and the figures of its batches so far."""
        self.figures: Tensor | None = None
        """Loss and accuracy of the last training batch, [2]."""
        self.own_metrics = dict(metrics or {})
        self.per_class = per_class
        self.val_metrics = EvalMetrics(num_classes, metrics, per_class)
        self.test_metrics = EvalMetrics(num_classes, metrics, per_class)

    def setup(self, stage: str) -> None:
        self._load_start()
        if stage == "fit" and self.compile_blocks:
            self.model.compile_blocks()  # type: ignore[operator]
        if stage == "fit" and self.class_weights is not None:
            self._weight_classes()
        if stage == "fit" and self.distillation != "none":
            # Not registered as a submodule, so that it is not saved, trained, averaged or put into train mode.
            self.__dict__["teacher"] = self._load_teacher()

    def _weight_classes(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            raise UserError("class_weights counts the images of a data module; without one set it to null")
        self.loss = WeightedCrossEntropy(balanced_weights(data.class_counts()), self.label_smoothing).to(self.device)

    def configure_model(self) -> None:
        """Let a strategy that shards networks shard this one, in its method `shard_module`."""
        if hasattr(self.trainer.strategy, "shard_module"):
            self.trainer.strategy.shard_module(self)

    def _load_start(self) -> None:
        # Only once, because it would overwrite what was trained since or came out of a checkpoint.
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
        return load_teacher(dict(self.hparams))

    def on_fit_start(self) -> None:
        if self.teacher is not None:
            self.teacher.to(self.device)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, img_size, img_size] to logits [B, num_classes]."""
        return self.model(images.to(self.dtype))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step on images and labels [B] or class probabilities [B, num_classes].

        Under Mixup and CutMix `train/acc1` counts the class with the larger share. With a distillation
        token it counts the class head alone.
        """
        images, targets = batch
        inputs = images.to(self.dtype)
        heads = network.forward_heads(self.model, inputs) if self.has_distillation_head else (self.model(inputs),)
        logits = precise(heads[0])
        loss = self.loss(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        if loss.ndim:
            raise UserError(f"the loss must be one number, got a tensor of {list(loss.shape)}: take the mean")
        if self.teacher is not None:
            judged = distillation_loss(heads[-1], self.teacher(images), self.distillation, self.distillation_tau)
            loss = (1 - self.distillation_alpha) * loss + self.distillation_alpha * judged
        self._log_step(loss.detach(), logits.detach(), targets)
        return loss

    def _log_step(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        # All on the device: reading a number, or making one on the host, would make the host wait for the device.
        heaviest = targets.argmax(dim=1) if targets.ndim == 2 else targets
        acc1 = 100 * (logits.argmax(dim=1) == heaviest).float().mean()
        self.figures = torch.stack([loss, acc1.to(loss)])
        step = self._mean_of_step(self.figures)
        if not self.is_logged():
            return
        step = self.trainer.strategy.reduce(step, reduce_op="mean")  # over all processes
        # With layer decay the groups have different rates; the head has the whole one.
        highest = max(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        rate = torch.full((), highest, dtype=torch.float32, device=self.device)
        self.log_dict({"train/loss": step[0], "train/acc1": step[1], "lr": rate}, on_step=True)

    def _mean_of_step(self, figures: Tensor) -> Tensor:
        """The mean over the batches that the running step has accumulated so far."""
        if self.trainer.accumulate_grad_batches == 1:
            return figures
        step, before = self._accumulated
        now = self.trainer.global_step
        self._accumulated = now, [*(before if step == now else []), figures]
        return torch.stack(self._accumulated[1]).mean(dim=0)

    def is_logged(self) -> bool:
        """Whether the figures of this step go to the loggers, or are an epoch's last, which callbacks may watch.

        Lightning takes 0.1 ms for each figure, logged or not.
        """
        trainer = self.trainer
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        return trainer.is_last_batch or (every > 0 and steps % every == 0)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, also where Lightning refuses: under mixed precision it accepts no fused optimizer.

        Under 16-mixed the gradients of a fused optimizer are still multiplied by the scaler's scale.
        """
        if not gradient_clip_val:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if gradient_clip_algorithm == "value":
            bound = torch.full((), gradient_clip_val, dtype=torch.float32, device=self.device)
            bound = bound * self.gradient_scale(optimizer)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-bound.to(parameter.dtype), bound.to(parameter.dtype))
        else:
            norm = self.gradient_norm(optimizer) if self.grad_norm is None else self.grad_norm
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole gradient, not scaled, in float32 at least; not finite if any part of it is not."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [precise(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return whole_tensor(get_total_norm(gradients)) / self.gradient_scale(optimizer)

    def gradient_scale(self, optimizer: Optimizer) -> Tensor | float:
        """The factor by which the gradients of `optimizer` are multiplied now."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return 1.0  # Lightning has the scaler unscale the gradients of other optimizers
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
        values = self.val_metrics.compute("val")
        self.log_dict(values, prog_bar=True)
        if self.per_class and self.val_metrics.per_class is not None and self.trainer.is_global_zero and self._writes():
            self._write_per_class(self.val_metrics.per_class)

    def _writes(self) -> bool:
        """Whether this is the validation of a run that has a folder."""
        trainer = self.trainer
        return trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def _write_per_class(self, counts: Tensor) -> None:
        names = self._class_names() or [str(index) for index in range(self.num_classes)]
        rows = [
            (name, images, correct, f"{100 * correct / images:.2f}" if images else "")
            for name, (images, correct) in zip(names, counts.tolist(), strict=True)
        ]
        path = Path(self.trainer.default_root_dir, rundir.PER_CLASS)
        disk.write_csv(path, ["class", "images", "correct", "recall"], rows)

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
        if trainer.train_dataloader is None:  # if max_epochs is -1, Lightning has not counted an epoch's batches
            trainer.fit_loop.setup_data()
        batches = trainer.num_training_batches
        if self.warmup_epochs and not math.isfinite(batches):
            raise UserError("the warm-up counts epochs, and the loader has no length: set limit_train_batches")
        steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches) if self.warmup_epochs else 0
        peak = self.lr
        if self.lr_base_size is not None:
            peak *= self._global_batch() / self.lr_base_size
        optimizer = build_optimizer(self.model, lr=peak, **self.optimizer_settings)
        scheduler = warmup_cosine(
            optimizer,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            total_steps=int(total_steps),
            warmup_lr=self.warmup_lr,
            min_lr=self.min_lr,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another network's weights; let this run's optimizer settings win, as its schedule does."""
        self._at_start = False
        self.remember(checkpoint)
        if self._trainer is not None and self._trainer.datamodule is not None:  # type: ignore[attr-defined]
            ckpt.rename_data_state(checkpoint, type(self._trainer.datamodule).__qualname__)  # type: ignore[attr-defined]
        known = ckpt.class_names(checkpoint)
        if known is not None and len(known) != self.num_classes:
            raise UserError(
                f"the checkpoint knows {len(known)} classes, the data has {self.num_classes}; "
                "to train on these from its weights start a new run with --model.weights"
            )
        ours, theirs = self.state_dict(), checkpoint["state_dict"]
        for key in [*ours, *theirs]:
            shapes = [tuple(state[key].shape) if key in state else None for state in (ours, theirs)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"the checkpoint is of another network: {key} is {shapes[1] or 'missing'} in it, "
                    f"{shapes[0] or 'missing'} in the configured model"
                )
        states = checkpoint.get("optimizer_states")
        if states and self._trainer is not None and self._trainer.state.fn == "fit":
            self._take_settings_of_now(checkpoint, states)

    def _take_settings_of_now(self, checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
        """Put this run's settings into the states of a checkpoint's optimizers, in place.

        Raises:
            UserError: the states are of another optimizer.
        """
        name, before = self.optimizer_settings["name"], checkpoint.get("hyper_parameters", {}).get("optimizer", "adamw")
        if name != before:
            raise UserError(
                f"the checkpoint's optimizer is {before}, this one {name}; "
                "start a new run from its weights with --model.weights"
            )
        groups = build_optimizer(self.model, lr=self.lr, **self.optimizer_settings).param_groups
        settings = {"weight_decay", "lr_scale", "betas", "eps", "fused", *self.optimizer_settings["arguments"]}
        for state in states:
            sizes = [[len(group["params"]) for group in side] for side in (groups, state["param_groups"])]
            if sizes[0] != sizes[1]:
                raise UserError(
                    f"the checkpoint's optimizer has groups of {sizes[1]} parameters, this one of {sizes[0]}; "
                    "start a new run from its weights with --model.weights"
                )
            for group, own in zip(state["param_groups"], groups, strict=True):
                group.update({key: own[key] for key in settings & own.keys()})

    def _global_batch(self) -> int:
        """Images that go into one optimizer step."""
        loader: Any = self.trainer.train_dataloader
        batch = loader.batch_size or loader.batch_sampler.batch_size
        return batch * self.trainer.world_size * self.trainer.accumulate_grad_batches
