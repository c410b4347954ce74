"""The LightningModule: steps, metrics and the optimizer around a bare network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from cait import ckpt, progress
from cait.errors import UserError
from cait.model import network
from cait.model.config import VARIANTS
from cait.model.initialization import difference
from cait.model.network import InitialWeights, NetworkSettings
from cait.settings import Given, flat, save_hyperparameters, take_from_data
from cait.train.losses import DistillationSettings, LossSettings
from cait.train.metrics import task_named
from cait.train.optim import OptimizerSettings
from cait.train.schedule import Length, ScheduleSettings, warmup_schedule

Batch = tuple[Tensor, Tensor]
ONE_VALUE = "Expected more than 1 value per channel when training"
"""What torch says of a BatchNorm that gets a single image with a single pixel."""


def precise(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, also of a DTensor. All processes must call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def with_gradients(optimizer: Optimizer) -> list[Any]:
    """The parameters that have a gradient."""
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


class SkipStep(Exception):  # noqa: N818  # it is no error
    """Raised from a hook before the optimizer's step: leave weights and optimizer as they are and go on."""


class CaiTModule(LightningModule):
    """A network with its loss, optimizer and schedule.

    With a teacher the loss is (1 - α) · loss of the labels + α · `cait.train.losses.distillation_loss`. Both read
    the class head, as released; with the network's field `distillation_token` the second reads that token's head, as
    in DeiT. Neither checkpoints nor the moving average include the teacher.

    Args:
        metrics: further metrics of validation by name, as
            {"f1": "torchmetrics.classification:MulticlassF1Score"}; see `cait.train.metrics.EvalMetrics`.
        per_class: log val/acc1_macro, the mean of the classes' recalls, and write those of the last validation to
            per_class.csv in the folder of the run.
        mean: of the normalisation that the images have had; with a data module it is the data's.
        std: the same.

    Raises:
        UserError: a model, field, loss, optimizer or metric that does not exist, or a setting out of its range.
    """

    class_names: list[str] | None = None
    """Names of the classes in the order of the logits; known once a checkpoint is loaded."""
    preprocessing: dict[str, Any] | None = None
    """The checkpoint's settings of how images are prepared."""
    reading: Any = None
    """How a file becomes RGB, a `cait.data.reading.Reading`; None takes the checkpoint's."""
    eval_transform: Any = None
    """A PIL image in RGB to uint8 [3, S, S], or to normalised float32 [3, S, S]; None takes the checkpoint's."""
    validates_first: bool = False
    """Whether to validate before the first step, and save."""

    @flat("model")
    def __init__(
        self,
        architecture: NetworkSettings,
        initial_weights: InitialWeights,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        schedule: ScheduleSettings,
        metrics: dict[str, str] | None = None,
        per_class: bool = False,
        *,
        distillation: DistillationSettings,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
        given: Given,
    ) -> None:
        super().__init__()
        save_hyperparameters(self, given)
        self.architecture, self.initial_weights, self.schedule = architecture, initial_weights, schedule
        self.name, self._at_start = architecture.name, True
        self.optimizer_settings, self.loss_settings, self.loss = optimizer, loss, loss.build()
        self.distillation, self.teacher = distillation, None
        self.grad_norm: Tensor | None = None
        """The norm in this step, if a callback has computed it; clipping then uses it."""
        self.figures: Tensor | None = None
        """Loss and accuracy of the last training batch, [2]."""
        self._figures_of_step: list[Tensor] = []
        """Those of the batches that the running step has accumulated."""
        self.own_metrics, self.per_class = dict(metrics or {}), per_class
        if None not in (architecture.img_size, architecture.num_classes):
            self._build()

    def _build(self) -> None:
        self.num_classes = self.hparams["num_classes"]
        self.model = self.architecture.build()
        self.has_distillation_head = network.has_distillation_head(self.model, trained=self.distillation.is_on)
        self.optimizer_settings.build(self.model, self.schedule.lr)  # a wrong setting fails here, not later
        if self.name not in VARIANTS:
            network.check(self.model, self.name, network.input_shape(self.hparams), self.num_classes)
        self.task = task_named(self.architecture.task, self.num_classes)
        if self.architecture.task is not None:
            self.loss = self.task.loss(self.loss_settings)
        self.val_metrics = self.new_metrics()

    def new_metrics(self) -> Any:
        """The metrics of a set of weights."""
        return self.task.metrics(self.own_metrics, self.per_class)

    def __getattr__(self, name: str) -> Any:
        if name == "model" and name not in self._modules:
            raise AttributeError("the network is built when a Trainer gets data; or give img_size and num_classes")
        return super().__getattr__(name)

    def configure_callbacks(self) -> list[Any]:
        """Build the network for the data, in the first hook: other callbacks already use it in their `setup`."""
        built = hasattr(self, "model")
        if not built or self.trainer.state.fn == "fit":
            self.architecture = replace(self.architecture, **take_from_data(self, self.trainer.datamodule))  # type: ignore[attr-defined]
        if not built:
            self._build()
        return []

    def setup(self, stage: str) -> None:
        # Only once and before a checkpoint is read, because it would overwrite what was trained since.
        if self._at_start and self.trainer.ckpt_path is None:
            self._load_initial_weights()
        self._at_start = False
        self.task.trains = stage == "fit"
        if stage != "fit":
            return
        self.schedule = replace(self.schedule, lr=self.hparams["lr"])  # Lightning's tuner may have changed it
        if self.architecture.compile:
            self.model.compile_blocks()  # type: ignore[operator]
        if self.loss_settings.class_weights is not None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            if data is None:
                raise UserError("class_weights counts the images of a data module; without one set it to null")
            self.loss = self.task.loss(self.loss_settings, data).to(self.device)
        if mixing := getattr(self.trainer.datamodule, "mixing", None):  # type: ignore[attr-defined]
            logits = torch.zeros(2, self.num_classes, device=self.device, requires_grad=True)
            self.loss_settings.check(self.loss, logits, shares=mixing.is_on or self.task.several)
        if self.distillation.is_on:
            from cait.train.teacher import load_teacher

            teacher = load_teacher(self.distillation, self.architecture, (self.hparams["mean"], self.hparams["std"]))
            # Not registered as a submodule, so that it is not saved, trained, averaged or put into train mode.
            self.__dict__["teacher"] = teacher

    def _load_initial_weights(self) -> None:
        own_classes = self._class_names() if self.initial_weights.weights is not None else None
        if notes := self.initial_weights.load(self.model, self.name, own_classes):
            rank_zero_info("weights from " + "; ".join(notes))

    def on_fit_start(self) -> None:
        if self.teacher is not None:  # Lightning moves the module after `setup`, and does not know the teacher
            self.teacher.to(self.device)
        if self.architecture.grad_checkpointing:  # here, because a strategy may have replaced layers
            network.count_once(self.model)
        if not self.trainer.num_sanity_val_steps or self.trainer.ckpt_path is not None:  # else they are tried there
            logits = torch.zeros(2, self.num_classes, device=self.device)
            self.val_metrics.check_own(logits, (logits if self.task.several else logits[:, 0]).long())

    def on_train_start(self) -> None:
        progress.begin(self.trainer)
        if self.validates_first:
            progress.validate(self.trainer)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if (rate := self.hparams["lr"]) != self.schedule.lr:  # as Lightning's LearningRateFinder sets it in a run
            late = f"hparams.lr became {rate:g} after the schedule was made for {self.schedule.lr:g}"
            raise UserError(f"{late}: find the rate before the run, and give it as --model.lr")

    def configure_model(self) -> None:
        """Let a strategy that shards networks shard this one, in its method `shard_module`."""
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        if hasattr(strategy, "shard_module"):
            strategy.shard_module(self)

    def _class_names(self) -> list[str] | None:
        """The data's classes; None from bare loaders, and in prediction without the training folder."""
        with suppress(AttributeError, UserError):
            return self.trainer.datamodule.class_names  # type: ignore[attr-defined]
        return None

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, img_size, img_size] to logits [B, num_classes]."""
        return self.model(images.to(self.dtype))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of images and labels [B], or class probabilities [B, num_classes]."""
        images, targets = batch
        heads = self._heads(images.to(self.dtype))
        logits = precise(heads[0])
        loss = self.loss(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        if self.teacher is not None:
            loss = self.distillation.loss(loss, heads[-1], self.teacher(images), self.task.distillation_loss)
        self._log_step(loss.detach(), logits.detach(), targets, batch_idx)
        return loss

    def _heads(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes] of the class head, and of the distillation head where there is one."""
        try:
            return network.forward_heads(self.model, images) if self.has_distillation_head else (self.model(images),)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            few = f"{self.name} has BatchNorm, which needs 2 images or more a process: raise --data.batch_size"
            raise UserError(few) from error

    def _log_step(self, loss: Tensor, logits: Tensor, targets: Tensor, batch_idx: int) -> None:
        """Log a step's loss, and top-1 of the class head: the class with the largest share counts."""
        # All on the device: reading a number, or making one on the host, would make the host wait for the device.
        best = logits.argmax(dim=1)
        right = targets.gather(1, best[:, None])[:, 0] == targets.amax(dim=1) if targets.ndim == 2 else best == targets
        acc1 = 100 * right.float().mean()
        self.figures = torch.stack([loss, acc1.to(loss)])
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._figures_of_step = []
        self._figures_of_step.append(self.figures)
        if not self.is_logged():
            return
        of_process = torch.stack(self._figures_of_step).mean(dim=0)
        step = self.trainer.strategy.reduce(of_process, reduce_op="mean")
        # With layer decay the groups have different rates; the head has the whole one.
        highest = max(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        rate = torch.full((), highest, dtype=torch.float32, device=self.device)
        self.log_dict({"train/loss": step[0], "train/acc1": step[1], "lr": rate}, on_step=True)

    def is_logged(self) -> bool:
        """Whether to log this step: every `log_every_n_steps`, and the last of an epoch. Each metric takes 0.1 ms."""
        trainer: Any = self.trainer
        steps, every = trainer.fit_loop.epoch_loop._batches_that_stepped + 1, trainer.log_every_n_steps
        return trainer.is_last_batch or (every > 0 and steps % every == 0)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients, also those of a fused optimizer under mixed precision, which Lightning refuses."""
        if not gradient_clip_val:
            return
        parameters = with_gradients(optimizer)
        if gradient_clip_algorithm == "value":
            bound = torch.full((), gradient_clip_val, dtype=torch.float32, device=self.device)
            bound = bound * self.gradient_scale(optimizer)
            for parameter in parameters:
                parameter.grad.clamp_(-bound.to(parameter.dtype), bound.to(parameter.dtype))
        else:
            norm = self.gradient_norm(optimizer) if self.grad_norm is None else self.grad_norm
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole gradient, not scaled, in float32 at least; not finite if any part of it is not."""
        norm = get_total_norm([precise(parameter.grad) for parameter in with_gradients(optimizer)])
        return whole_tensor(norm) / self.gradient_scale(optimizer)

    def gradient_scale(self, optimizer: Optimizer) -> Tensor | float:
        """The factor by which the gradients of `optimizer` are multiplied now, as under 16-mixed a fused one's are."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return 1.0  # Lightning has the scaler unscale the gradients of other optimizers
        return scaler._get_scale_async()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The last step of an epoch may have fewer batches than Lightning has divided the loss by."""
        trainer, every = self.trainer, self.trainer.accumulate_grad_batches
        rest = trainer.num_training_batches % every
        if rest and trainer.fit_loop.batch_idx >= trainer.num_training_batches - rest:
            loss = loss * (every / rest)
        super().backward(loss, *args, **kwargs)

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
        trainer: Any = self.trainer
        has_folder = trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fast_dev_run
        if self.per_class and trainer.is_global_zero and has_folder:
            path = Path(trainer.default_root_dir, "per_class.csv")
            self.val_metrics.write_per_class(path, self._class_names() or [*map(str, range(self.num_classes))])

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities [B, num_classes] in float32."""
        return self.task.probabilities(self(batch[0]))

    def transform(self, image: Any) -> Tensor:
        """The network's input for an image, prepared as in evaluation; see `cait.train.prediction.transform`."""
        from cait.train import prediction

        return prediction.transform(self, image)

    def predict(self, images: Any, top_k: int | None = None) -> Any:
        """The most probable classes of an image, or of each of a list; see `cait.train.prediction.predict`."""
        from cait.train import prediction

        return prediction.predict(self, images, top_k)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        progress.batches_an_epoch(self.trainer)  # it sets up the loaders, as Lightning does later
        optimizer = self.optimizer_settings.build(self.model, self.peak_lr())
        scheduler = warmup_schedule(optimizer, self.schedule, self.schedule_length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def schedule_length(self) -> Length:
        """How long the schedule is from where the Trainer stands. Raises UserError if the run has no end."""
        trainer, epochs = self.trainer, self.schedule.warmup_epochs
        if epochs and not math.isfinite(progress.batches_an_epoch(trainer)):
            raise UserError("the warm-up counts epochs, and the loader has no length: set limit_train_batches")
        if not math.isfinite(total := progress.total_steps(trainer)):
            raise UserError("the schedule needs an end: set --trainer.max_epochs or --trainer.max_steps")
        warmup = round(progress.steps_until(trainer, epochs)) if epochs else 0
        return Length(warmup, int(total), (trainer.max_epochs or -1, trainer.max_steps))

    def peak_lr(self) -> float:
        """The highest rate: `lr`, which counts for `lr_base_size` images a step if that is set."""
        if self.schedule.lr_base_size is None:
            return self.schedule.lr
        loader: Any = self.trainer.train_dataloader
        batch = (loader.batch_size or loader.batch_sampler.batch_size) * self.trainer.world_size
        return self.schedule.lr * batch * self.trainer.accumulate_grad_batches / self.schedule.lr_base_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another network's weights; let this run's optimizer settings win, as its schedule does."""
        self._at_start = False
        data = ckpt.data_state(checkpoint) or {}
        known = self.class_names = data.get("class_names")
        self.preprocessing, self.reading, self.eval_transform = data.get("preprocessing"), None, None
        trainer: Any = self._trainer
        if trainer is not None and trainer.datamodule is not None:
            ckpt.rename_data_state(checkpoint, type(trainer.datamodule).__qualname__)
        if known is not None and len(known) != self.num_classes:
            counts = f"the checkpoint knows {len(known)} classes, the data has {self.num_classes}"
            raise UserError(f"{counts}; to train on these from its weights start a new run with --model.weights")
        if differs := difference(self.state_dict(), checkpoint["state_dict"]):
            raise UserError(f"the checkpoint is of another network: {differs}")
        if trainer is None or trainer.state.fn != "fit":
            return
        if states := checkpoint.get("optimizer_states"):
            before = checkpoint.get("hyper_parameters", {})
            self.optimizer_settings.apply(states, before, self.model, self.schedule.lr)
