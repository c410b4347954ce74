"""The LightningModule: steps, metrics and the optimizer around a bare network."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from cait import __version__, ckpt, disk, loops, plugins
from cait.ckpt import Checkpoint, State
from cait.errors import UserError, told_as
from cait.model import network
from cait.model.config import VARIANTS
from cait.model.network import InitialWeights, NetworkSettings, precise
from cait.references import is_path, name_of, overridden
from cait.settings import Settings, check_names, values
from cait.signature import ReadsData
from cait.train.losses import DistillationSettings, LossSettings, parameters_behind
from cait.train.metrics import task_named
from cait.train.optim import (
    Length,
    OptimizerSettings,
    ScheduleSettings,
    WarmupSchedule,
    begins_with,
)

Batch = tuple[Tensor, Tensor]
NOTHING: tuple[list[State], State] = ([], {})
ANSWERS = ("forward", "predict_step", "validation_step")
"""Methods that say what a run answers."""
SAME: Settings = {"sync_dist": True, "reduce_fx": "max"}
"""Arguments to log what all processes have alike: Lightning warns of what is not reduced, and a mean may round."""


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, also of a DTensor. All processes must call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def share_buffers(network: nn.Module) -> None:
    """Give all processes the buffers of process 0, which are saved: BatchNorm's statistics are of each one's images.

    DDP does so before a forward pass, but not while gradients accumulate.
    """
    for buffer in network.buffers():
        first = buffer.contiguous()
        dist.broadcast(first, 0)
        buffer.copy_(first)


def lay_out_buckets(network: Any) -> None:
    """Give DDP's buckets of gradients, before the first step, the layout that they keep.

    Which process adds up an element, and in which order, follows from its place in a bucket. DDP lays the buckets out
    anew after its first backward pass, in the order in which gradients came. So a resumed run's first step would differ
    in its last bits from the same step of a run left alone. Here a gradient of zeros comes for each parameter, from the
    last to the first, without a pass through the network. Networks that leave parameters out keep their first layout;
    with `static_graph` DDP has to see a real step first.
    """
    if (
        not isinstance(network, DistributedDataParallel)
        or network.find_unused_parameters
        or network.static_graph
    ):
        return
    prepare_for_backward(network, None)
    for parameter in reversed([*network.parameters()]):
        if parameter.requires_grad:
            parameter.backward(torch.zeros_like(parameter))
    network.zero_grad()


@dataclass(frozen=True)
class ModuleSettings(
    *plugins.groups("model"),  # type: ignore[misc]
    DistillationSettings,
    ScheduleSettings,
    OptimizerSettings,
    LossSettings,
    InitialWeights,
    NetworkSettings,
):
    """All settings of the network and its training, those of extras too."""

    metrics: dict[str, str] | None = None
    """Further metrics of validation by name, as {"f1": "torchmetrics.classification:MulticlassF1Score"}; see
    `cait.train.metrics.EvalMetrics`."""
    per_class: bool = False
    """Log val/acc1_macro, the mean of the classes' recalls."""
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    """Mean of the normalization that the images have had; with a data module it is the data's."""
    std: Sequence[float] = IMAGENET_DEFAULT_STD
    """Standard deviation of that normalization."""


class SkipStep(Exception):  # noqa: N818  # it is no error
    """Raised from a hook before the optimizer's step: leave weights and optimizer as they are and go on."""


def top1(logits: Tensor, targets: Tensor) -> Tensor:
    """Percent of images whose most probable class has the largest share; NaN of no image.

    Targets are labels [B], below 0 for an image that is not counted, or shares [B, num_classes], none for such a one.
    """
    best = logits.argmax(dim=1)
    if targets.ndim == 2:
        largest = targets.amax(dim=1)
        right = targets.gather(1, best[:, None])[:, 0] == largest
        counted = largest > 0
    else:
        right = best == targets
        counted = targets >= 0
    return 100 * (right & counted).sum() / counted.sum()


class CaiTModule(ReadsData, LightningModule):
    """A network with its loss, optimizer and schedule.

    A step of `cait fit` is, in this order, with the function that does each:

    1. normalize, erase and mix the batch: `ImageNetDataModule.on_after_batch_transfer`
    2. seed dropout and stochastic depth: `callbacks.StepSeed.on_train_batch_start`
    3. forward and loss: `training_step`
    4. backward: `backward`; then 1 to 4 again for each batch that is accumulated
    5. guard: `guards.nonfinite.NonFiniteGuard.on_before_optimizer_step` measures the gradient's norm, and skips 7 if it
       is not finite
    6. clip by that norm: `clip_gradients`
    7. step: `optimizer_step`
    8. schedule: `optim.WarmupSchedule.step`
    9. moving average: `callbacks.EMA.on_train_batch_end`
    10. validate, when it is due: `validation_step`, `on_validation_epoch_end`, and those of `callbacks.EMA`
    11. save, when it is due: `run.checkpoints`

    With a teacher the loss is (1 - α) · loss of the labels + α · `cait.train.losses.distillation_loss`. Neither
    checkpoints nor the moving average include the teacher.

    Args:
        first, settings: the fields of `ModuleSettings`, `name` first.

    Raises:
        UserError: a model, field, loss, optimizer or metric that does not exist, or a setting out of its range.
    """

    class_names: list[str] | None = None
    """Names of the classes in the order of the logits; known once a checkpoint is loaded."""
    preprocessing: Settings | None = None
    """The checkpoint's settings of how images are prepared."""
    reading: Any = None
    """How a file becomes RGB, a `cait.data.reading.Reading`; None takes the checkpoint's."""
    eval_transform: Any = None
    """A PIL image in RGB to uint8 [3, S, S], or to normalized float32 [3, S, S]; None takes the checkpoint's."""
    validates_first: bool = False
    """Whether to validate before the first step, and save."""

    def __init__(self, *first: Any, **settings: Any) -> None:
        super().__init__()
        check_names(self, ModuleSettings, settings)
        self.settings = ModuleSettings(*first, **settings)
        self.save_hyperparameters(values(self.settings))
        self.name = self.settings.name
        self.starts_anew = True
        self.loss = self.settings.build_loss()
        self.teacher = None
        self.grad_norm: Tensor | None = None
        """The norm in this step, if a callback has computed it; clipping then uses it."""
        self.figures: Tensor | None = None
        """Loss and accuracy of the last training batch, [2]."""
        self._before: tuple[list[State], State] = NOTHING
        """States of the optimizers, and hyper-parameters, of the run that goes on; until training begins."""
        self._figures_of_step: list[Tensor] = []
        """Those of the batches that the running step has accumulated."""
        if None not in (self.settings.img_size, self.settings.num_classes):
            self._build()

    def _build(self) -> None:
        self.num_classes = self.hparams["num_classes"]
        self.model = self.settings.build_network()
        if self.name not in VARIANTS:
            network.check(
                self.model, self.name, network.input_shape(self.hparams), self.num_classes
            )
        self.task = task_named(self.settings.task, self.num_classes)
        if self.settings.task is not None:
            self.loss = self.task.loss(self.settings)
        self.val_metrics = self.new_metrics()
        # a wrong setting fails here, not later
        self._build_optimizer(self.settings.lr)

    def _build_optimizer(self, lr: float) -> Optimizer:
        """That of the settings, for the network and for what the loss and a subclass learn beside it.

        A `configure_optimizers` of one's own adds what the subclass registers by itself.
        """
        owner: Any = self
        if self.overrides("configure_optimizers"):
            owner = self.loss
        parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
        others = {*self.model.parameters(), *self.val_metrics.parameters()}
        learned = [
            parameter
            for parameter in parameters
            if parameter.requires_grad and parameter not in others
        ]
        return self.settings.build_optimizer(self.model, lr, learned)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss":  # torch would take nothing but a module in a module's place
            self._modules.pop(name, None)
        super().__setattr__(name, value)

    def overrides(self, *names: str) -> list[str]:
        """Those of the methods that a subclass has replaced."""
        return overridden(type(self), CaiTModule, *names)

    def new_metrics(self) -> Any:
        return self.task.metrics(self.settings.metrics or {}, self.settings.per_class)

    def __getattr__(self, name: str) -> Any:
        if name == "model" and name not in self._modules:
            raise AttributeError(
                "the network is built when a Trainer gets data; or give img_size and num_classes"
            )
        return super().__getattr__(name)

    def configure_callbacks(self) -> list[Any]:
        """Build the network for the data, in the first hook: other callbacks already use it in their `setup`.

        Returns what the module's settings need of extras, if the Trainer has not got it from the command line.
        """
        trainer: Any = self.trainer
        is_built = hasattr(self, "model")
        fits = trainer.state.fn == "fit"
        if fits or not is_built:
            self._take_from_data(trainer.datamodule)
        if not is_built:
            self._build()
        present = set(map(type, trainer.callbacks))
        needed = plugins.step_callbacks(self, trainer.datamodule) if fits else []
        return [callback for callback in needed if type(callback) not in present]

    def _take_from_data(self, data: Any) -> None:
        """Take the sizes and the task from a data module, if there is one.

        They and the normalization join the hyper-parameters. Raises UserError if other sizes were given, or the data
        module makes images of other channels.
        """
        chosen: Settings = {}
        for name, default in (("img_size", 224), ("num_classes", 1000), ("task", None)):
            asked = self.hparams[name]
            value = getattr(data, name, None) or asked or default
            if asked not in (None, value):
                raise UserError(
                    f"the module has {name} {asked}, the data has {value}: leave it out of the module"
                )
            chosen[name] = value
        self.settings = replace(self.settings, **chosen)
        if hasattr(data, "preprocessing"):
            channels = network.input_shape({**self.hparams, **chosen})[0]
            if data.settings.in_chans != channels and not data.has_own_eval_transform:
                raise UserError(
                    f"the network has in_chans {channels}, the data module {data.settings.in_chans}: give both the same"
                )
            chosen |= {"mean": data.settings.mean, "std": data.settings.std}
        self.save_hyperparameters(chosen)

    def setup(self, stage: str) -> None:
        if self.starts_anew:  # only once: later it would overwrite what was trained since
            self._load_initial_weights()
        self.starts_anew = False
        if self.overrides("predict_step"):
            name = type(self).__name__
            rank_zero_info(
                f"{name}.predict_step is for `predict` and cait.load: a validation scores what forward gives"
            )
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        names = self._classes_of_data()
        if names is not None:  # for `predict`, once it is trained
            self.class_names = names
            self.eval_transform = getattr(data, "eval_transform", None)
            self.reading = data.settings if hasattr(data, "preprocessing") else None
        # Lightning's tuner may have changed it
        settings = replace(self.settings, lr=self.hparams["lr"])
        self.settings = settings
        settings.try_step(self.trainer.strategy.root_device)
        has_live_norms = not self.hparams.get("freeze_norm")
        if settings.grad_checkpointing and has_live_norms and network.counts_twice(self.model):
            raise UserError(
                "BatchNorm would count each batch twice: set model.grad_checkpointing to false"
            )
        if settings.compile:
            self.model.compile_blocks()  # type: ignore[operator]
        if settings.class_weights is not None:
            if data is None:
                raise UserError(
                    "class_weights counts the images of a data module; without one set it to null"
                )
            self.loss = self.task.loss(settings, data).to(self.device)
        if settings.distills:
            if self.task.several:
                raise UserError(
                    "model.distillation is for images of one class each; set it to none"
                )
            from cait.train.teacher import load_teacher

            students = (self.hparams["mean"], self.hparams["std"])
            # Not registered as a submodule, so that it is not saved, trained, averaged or put into train mode.
            self.__dict__["teacher"] = load_teacher(settings, settings, students, names)

    def _load_initial_weights(self) -> None:
        own_classes = None if self.settings.weights is None else self._classes_of_data()
        notes = self.settings.load_into(self.model, self.name, own_classes)
        if notes:
            from cait.model.weights import HEAD_ANEW

            if HEAD_ANEW in notes and self.trainer.state.fn != "fit":
                root = self.trainer.datamodule.root  # type: ignore[attr-defined]
                raise UserError(f"{notes[0]} has no head for the classes of {root}")
            rank_zero_info(f"weights from {'; '.join(notes)}")

    def _classes_of_data(self) -> list[str] | None:
        # bare loaders; prediction without the training folder
        with suppress(AttributeError, UserError):
            return self.trainer.datamodule.class_names  # type: ignore[attr-defined]
        return None

    def on_fit_start(self) -> None:
        self._before = NOTHING
        if not any(optimizer.param_groups for optimizer in self.trainer.optimizers):
            raise UserError(
                f"configure_optimizers of {type(self).__name__} gives no optimizer: return one"
            )
        if self.teacher:  # Lightning moves the module after `setup`, and does not know the teacher
            self.teacher.to(self.device)

    def on_train_start(self) -> None:
        loops.begin(self.trainer)
        lay_out_buckets(self.trainer.strategy.model)
        if self.validates_first:
            loops.validate(self.trainer)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        rate = self.hparams["lr"]
        planned = self.settings.lr
        if rate != planned:  # as Lightning's LearningRateFinder sets it in a run
            raise UserError(
                f"hparams.lr became {rate:g} after the schedule was made for {planned:g}: "
                "find the rate before the run, and give it as --model.lr"
            )

    def configure_model(self) -> None:
        """Take the run's precision, and let a strategy that shards networks shard this one, by its `shard_module`."""
        strategy: Any = getattr(self._trainer, "strategy", None)
        if strategy is not None:
            # Lightning does it once a checkpoint is loaded, into float32 that cuts off float64's last bits.
            strategy.precision_plugin.convert_module(self)
        if hasattr(strategy, "shard_module"):
            strategy.shard_module(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, img_size, img_size] to logits [B, num_classes], in training, validation and predictions."""
        return self.model(images)

    def logits(self, images: Tensor, model: nn.Module | None = None) -> Tensor:
        """Logits [B, num_classes] in float32 by `forward`, with `model` in the network's place if it is given."""
        ours = self.model
        self.model = ours if model is None else model
        try:
            return network.logits_of(self, images)
        finally:
            self.model = ours

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of images and labels [B], or class probabilities [B, num_classes]."""
        images, targets = batch
        logits = self._training_logits(images)
        loss = self._label_loss(logits, targets)
        if batch_idx == 0:
            self._check_loss(loss, logits)
        if self.teacher:
            loss = self.settings.distilled_loss(loss, logits, self.teacher(images))
        self._log_step(loss.detach(), logits.detach(), targets, batch_idx)
        return loss

    def _training_logits(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] in float32 at least. Raises UserError if the network returns something else."""
        logits = self(images.to(self.dtype))
        shape = network.kind_of(logits)
        if shape != [len(images), self.num_classes]:
            raise UserError(
                f"{self.name} gives no logits in training: try --model.fields.aux_logits false, "
                f"or have it return logits alone, not {shape}"
            )
        return precise(logits)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [B, num_classes] and labels [B], or class probabilities [B, num_classes] after mixing.

        Override it for another; a teacher's part comes on top.
        """
        return self.loss(logits, targets)

    def _label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of the labels []. Raises UserError if one of the user's own fails."""
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        with told_as(f"the loss {self._loss_name()} fails"):
            loss = self.loss_of(logits, targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(
                    f"it must return a tensor of one number, not {network.kind_of(loss)}"
                )
        return loss.reshape(())

    def _loss_name(self) -> str:
        """What the user has chosen or written."""
        if self.overrides("loss_of"):
            return f"{type(self).__name__}.loss_of"
        return self.settings.loss

    def _check_loss(self, loss: Tensor, logits: Tensor) -> None:
        """Raise UserError if the loss has a parameter that no optimizer trains."""
        trained = {
            parameter
            for optimizer in self.trainer.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if not trained.issuperset(parameters_behind(loss, logits)):
            raise UserError(
                f"the loss {self._loss_name()} has a parameter that no optimizer trains: register it in an nn.Module "
                "that is the loss, or in the LightningModule; a configure_optimizers of your own takes it too"
            )

    def _log_step(self, loss: Tensor, logits: Tensor, targets: Tensor, batch_idx: int) -> None:
        """Log the loss and accuracy of a step, over the batches that it accumulates and all processes."""
        trainer = self.trainer
        # All on the device: reading a number, or making one on the host, would make the host wait for the device.
        self.figures = torch.stack([loss, top1(logits, targets).to(loss)])
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._figures_of_step = []
        self._figures_of_step.append(self.figures)
        if not self.is_logged():
            return
        figures = torch.stack(self._figures_of_step).nanmean(dim=0)
        loss, acc1 = trainer.strategy.reduce(figures, reduce_op="mean")
        # With layer decay the groups have different rates; the head has the whole one.
        highest = max(group["lr"] for group in trainer.optimizers[0].param_groups)
        rate = torch.full((), highest, dtype=torch.float32, device=self.device)
        self.log_dict({"train/loss": loss, "train/acc1": acc1, "lr": rate}, on_step=True)

    def is_logged(self) -> bool:
        """Whether to log this step: every `log_every_n_steps`, and the last of an epoch. Each metric takes 0.1 ms."""
        trainer: Any = self.trainer
        every = trainer.log_every_n_steps
        return trainer.is_last_batch or (every > 0 and (trainer.global_step + 1) % every == 0)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients, also those of a fused optimizer in mixed precision, which Lightning refuses."""
        if not gradient_clip_val:
            return
        weights = [*self.trainer.precision_plugin.main_params(optimizer)]
        norm = self.grad_norm
        # with optimization by hand it is that of the step before
        if norm is None or not self.automatic_optimization:
            norm = self.gradient_norm(optimizer)
        if gradient_clip_algorithm != "value":
            clip_grads_with_norm_(weights, gradient_clip_val, norm)
            return
        scale = self.gradient_scale(optimizer)
        # GradScaler has to see an infinity
        if not isinstance(scale, Tensor) or norm.isfinite():
            clip_grad_value_(weights, float(gradient_clip_val * scale))

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole gradient, not scaled, in float32 at least; not finite if any part of it is not."""
        weights = self.trainer.precision_plugin.main_params(optimizer)
        gradients = [precise(weight.grad) for weight in weights if weight.grad is not None]
        return whole_tensor(get_total_norm(gradients)) / self.gradient_scale(optimizer)

    def gradient_scale(self, optimizer: Optimizer) -> Tensor | float:
        """The factor by which the gradients of `optimizer` are multiplied now, as under 16-mixed a fused one's are."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
            return scaler._get_scale_async()
        return 1.0  # Lightning has the scaler unscale the gradients of other optimizers

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The last step of an epoch may have fewer batches than Lightning has divided the loss by."""
        batches = self.trainer.num_training_batches
        every = self.trainer.accumulate_grad_batches
        rest = batches % every
        if rest and self.trainer.fit_loop.batch_idx >= batches - rest:
            loss = loss * (every / rest)
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with suppress(SkipStep):
            super().optimizer_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        if self.trainer.world_size > 1:
            share_buffers(self.model)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Count a batch; its logits [B, num_classes] are for callbacks."""
        images, labels = batch
        logits = self.logits(images)
        self.val_metrics.update(logits, labels)
        return logits

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute("val"), prog_bar=True, **SAME)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities [B, num_classes] in float32."""
        return self.task.probabilities(self.logits(batch[0]))

    def transform(self, image: Any) -> Tensor:
        """The network's input for an image, prepared as in evaluation; see `cait.train.prediction.transform`."""
        from cait.train import prediction

        return prediction.transform(self, image)

    def predict(self, images: Any, top_k: int | None = None) -> Any:
        """The most probable classes of an image, or of each of a list; see `cait.train.prediction.predict`."""
        from cait.train import prediction

        return prediction.predict(self, images, top_k)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        loops.batches_an_epoch(self.trainer)  # it sets up the loaders, as Lightning does later
        optimizer = self._build_optimizer(self.peak_lr())
        states, before = self._before
        if self.overrides("configure_optimizers"):  # what it returns may have other groups
            states = [state for state in states if begins_with(state, optimizer.param_groups)]
        self.settings.apply(states, before, optimizer.param_groups)
        step = self.trainer.global_step
        schedule = WarmupSchedule(optimizer, self.settings, self.schedule_length, step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def schedule_length(self) -> Length:
        """How long the schedule is from where the Trainer stands. Raises UserError if the run has no end."""
        trainer = self.trainer
        epochs = self.settings.warmup_epochs
        warmup = loops.steps_until(trainer, epochs) if epochs else 0
        if math.isinf(warmup):
            raise UserError(
                "the warm-up counts epochs, and the loader has no length: set limit_train_batches"
            )
        total = loops.total_steps(trainer)
        if math.isinf(total):
            raise UserError(
                "the schedule needs an end: set --trainer.max_epochs or --trainer.max_steps"
            )
        loops.check_least(trainer, total)
        return Length(round(warmup), int(total), (trainer.max_epochs or -1, trainer.max_steps))

    def peak_lr(self) -> float:
        """The highest rate: `lr`, which counts for `lr_base_size` images a step if that is set."""
        lr = self.settings.lr
        base_size = self.settings.lr_base_size
        if base_size is None:
            return lr
        loader: Any = self.trainer.train_dataloader
        batch = (loader.batch_size or loader.batch_sampler.batch_size) * self.trainer.world_size
        return lr * batch * loops.batches_a_step(self.trainer) / base_size

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Say where the run stands, and whose it is, in every checkpoint, whatever saves it."""
        position = loops.Position.now(self.trainer)
        checkpoint[loops.POSITION] = [*position]
        checkpoint[loops.STOP] = loops.waits_to_stop(self.trainer)
        checkpoint[ckpt.MODULE] = [name_of(type(self)), *self.overrides(*ANSWERS)]
        checkpoint["cait"] = __version__
        checkpoint["format"] = ckpt.FORMAT
        # That of the last batch, counted from 0.
        checkpoint["epoch"] = position.epoch if position.batch else max(0, position.epoch - 1)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse another network's weights; let this run's settings of the optimizer win, as those of its schedule do.

        Raises UserError for a checkpoint of other classes or of another network.
        """
        trainer: Any = self._trainer
        self.starts_anew = False
        data = ckpt.data_state(checkpoint) or {}
        self.class_names = data.get("class_names")
        self.preprocessing = data.get("preprocessing")
        self.reading = self.eval_transform = None
        data_module = trainer and trainer.datamodule
        if data_module is not None:
            ckpt.rename_data_state(checkpoint, type(data_module).__qualname__)
        self._check_class(checkpoint, data_module)
        self._check_classes(data, data_module)
        before = checkpoint.get("hyper_parameters", {})
        self._check_network(checkpoint["state_dict"], before.get("img_size"))
        if not trainer or trainer.state.fn != "fit":
            return
        images = getattr(data_module, "world_batch_size", 1)
        loops.continue_run(checkpoint, trainer, data.get("world_batch_size", images), images)
        states = checkpoint.get("optimizer_states", [])
        groups = {"param_groups": [dict]}
        disk.check_shape(states, [groups], Path(str(trainer.ckpt_path)), "optimizer_states")
        self._before = states, before

    def _check_class(self, checkpoint: Checkpoint, data_module: Any) -> None:
        """Raise UserError if the run is of another class, and goes on, or its answers are that class's."""
        ours = name_of(type(self))
        before, *answers = checkpoint.get(ckpt.MODULE) or [ours]
        goes_on = self._trainer and self._trainer.state.fn == "fit"
        if before == ours or not (goes_on or answers):
            return
        remedy = f"take the script that has {before} in place of `cait`"
        if is_path(before):
            remedy = f"take that class, in a command by --module {before}"
        if goes_on:
            if not getattr(data_module, "check_resume", True):
                return
            remedy += ", or to continue anyway add --data.check_resume false"
        raise UserError(f"the run's module is {before}, this one {ours}: {remedy}")

    def _check_classes(self, data: State, data_module: Any) -> None:
        known = self.class_names
        if known is None or len(known) == self.num_classes:
            return
        if data_module is not None:
            data_module.load_state_dict(data)  # its error names them
        raise UserError(
            f"the checkpoint knows {len(known)} classes, the network has {self.num_classes}"
        )

    def _check_network(self, state: State, img_size: int | None) -> None:
        """Raise UserError if `state` is of another network.

        First add and leave out what loss and metrics have by the settings of now. `state` stays: it holds versions too.
        """
        from cait.model.weights import difference

        now = self.state_dict()
        for key in now.keys() ^ state.keys():
            if key.startswith(("loss.", "val_metrics.")):
                state.pop(key, None)
                if key in now:
                    state[key] = now[key]
        differs = difference(now, state)
        if not differs:
            return
        size = self.hparams["img_size"]
        if img_size not in (None, size):
            remedy = "at a new size give its weights to --model.weights"
            differs = f"img_size was {img_size}, is {size}; {remedy}; {differs}"
        raise UserError(f"the checkpoint is of another network: {differs}")
