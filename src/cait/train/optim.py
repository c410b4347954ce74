"""The optimizer, its parameter groups, and the learning rate of every step."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import timm.optim
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cait import references
from cait.errors import UserError, told_as
from cait.settings import Group, In, Needs, values


@dataclass(frozen=True)
class OptimizerSettings(Group):
    """The optimizer and its parameter groups."""

    optimizer: str = "adamw"
    """"adamw" is torch's, fused. Any other is timm's, as "lamb", "sgd", "muon" or "lookahead_lion", or
    "package.module:factory", which is called with parameter groups, lr and `optimizer_args`."""
    optimizer_args: dict[str, Any] | None = None
    """Further arguments of the optimizer, as {"betas": [0.9, 0.95]}."""
    layer_decay: Annotated[float | None, In("(0, 1]")] = None
    """Scale the rate of each layer by this factor once for each layer above it, as timm does; None does not."""
    weight_decay: Annotated[float | None, In("[0, inf)")] = None
    """Not for biases, norms, LayerScale, position and class embeddings. None takes 0.05, the paper's, for adamw, and 0
    for any other optimizer."""

    def build_optimizer(self, network: nn.Module, lr: float) -> Optimizer:
        """Build the optimizer of a network. Raises UserError if there is none, or it takes other arguments."""
        name, given = self.optimizer, dict(self.optimizer_args or {})
        default = 0.05 if name.lower() == "adamw" else 0.0
        weight_decay = default if self.weight_decay is None else self.weight_decay
        decay: dict[str, Any] = dict(weight_decay=weight_decay, layer_decay=self.layer_decay)
        with told_as(f"optimizer {name}"):  # unknown arguments, packages that are not installed
            if name.lower() == "adamw":
                optimizer: Any = torch.optim.AdamW(param_groups(network, **decay), lr=lr, **{"fused": True} | given)
            elif references.is_path(name):
                optimizer = references.locate(name)(param_groups(network, **decay), lr=lr, **given)
            else:
                optimizer = timm.optim.create_optimizer_v2(network, opt=name, **given | dict(lr=lr) | decay)
            if not isinstance(optimizer, Optimizer):
                raise UserError(f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
            inspect.signature(optimizer.step).bind(closure=None)  # as Lightning calls it
        if getattr(optimizer, "is_second_order", False):
            raise UserError(f"optimizer {name} needs second derivatives, which a run does not have; take another")
        return optimizer

    def apply(self, states: list[dict[str, Any]], before: Mapping[str, Any], network: nn.Module, lr: float) -> None:
        """Put these settings into the states of a checkpoint's optimizers, if they have changed.

        A schedule of your own may change betas or the weight decay of a group, so else they stay.

        `before` are the hyper-parameters of the checkpoint's run. Raises UserError if it is another optimizer.
        """
        remedy = "start a new run from its weights with --model.weights"
        if (name := before.get("optimizer", self.optimizer)) != self.optimizer:
            raise UserError(f"the checkpoint's optimizer is {name}, this one {self.optimizer}; {remedy}")
        groups = self.build_optimizer(network, lr).param_groups
        settings = {"lr_scale", "fused"}
        if any(before.get(name) != value for name, value in values(self, OptimizerSettings).items()):
            arguments = (self.optimizer_args or {}) | (before.get("optimizer_args") or {})
            settings |= {"weight_decay", "betas", "eps", *arguments}
        sizes = [len(group["params"]) for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        for state in states:
            old = [len(group["params"]) for group in state["param_groups"]]
            if sizes != old:
                raise UserError(f"the checkpoint's optimizer has groups of {old} parameters, not {sizes}; {remedy}")
            for group, new in zip(state["param_groups"], groups, strict=True):
                group.update({key: new[key] for key in settings & new.keys()})
            for index, moments in state["state"].items():
                for key, value in moments.items():
                    moments[key] = _laid_out_as(parameters[index], value)


def _laid_out_as(parameter: Tensor, value: Any) -> Any:
    """A moment in its parameter's memory format: the fused AdamW takes the numbers of both as they lie in memory."""
    is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
    if not is_moment or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def param_groups(network: nn.Module, weight_decay: float, layer_decay: float | None = None) -> list[dict[str, Any]]:
    """timm's groups of the trainable parameters: without and with weight decay, with `layer_decay` two for each layer.

    Not decayed: biases, every parameter of fewer than two dimensions (norms, LayerScale's λ) and the names in
    `network.no_weight_decay()`.
    """
    exempt: set[str] = getattr(network, "no_weight_decay", set)()
    if layer_decay is None:
        # A decay of 0 would give a single group, and no checkpoint could change it.
        groups = timm.optim.param_groups_weight_decay(network, 1.0, no_weight_decay_list=exempt)
        return [group | {"weight_decay": group["weight_decay"] * weight_decay} for group in groups]
    if not hasattr(network, "group_matcher"):
        raise UserError(f"{type(network).__name__} names no layers, which layer_decay needs: give it group_matcher()")
    return timm.optim.param_groups_layer_decay(network, weight_decay, exempt, layer_decay=layer_decay)


@dataclass(frozen=True)
class ScheduleSettings(Group):
    """The learning rate of every step; see `WarmupSchedule`."""

    lr: Annotated[float, In("[0, inf)")] = 5e-4
    """Peak learning rate, for `lr_base_size` images a step."""
    lr_base_size: Annotated[int | None, In("[1, inf)")] = 512
    """Scale the rate by global batch / lr_base_size, where the global batch counts processes and accumulation; None
    takes `lr` as it is."""
    warmup_epochs: Annotated[float, In("[0, inf)")] = 5
    """Length of the linear warm-up."""
    warmup_lr: Annotated[float, In("[0, inf)"), Needs("a warm-up", "warmup_epochs")] = 1e-6
    """Rate of the first step, not scaled."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: "cosine" falls to `min_lr`, "constant" keeps the peak. A run that kept the peak and is resumed
    with "cosine" falls from the step that it has reached."""
    min_lr: Annotated[
        float,
        In("[0, inf)"),
        Needs("--model.schedule cosine", "schedule", lambda schedule: schedule == "cosine"),
    ] = 1e-5
    """Rate at the end of the cosine, not scaled."""


class Length(NamedTuple):
    """How long a schedule is, in optimizer steps from the beginning of the run."""

    warmup: int | float
    total: int
    limits: tuple[int, int] = (-1, -1)
    """What it follows from: max_epochs and max_steps."""


class WarmupSchedule(LRScheduler):
    """Linear warm-up, then a cosine or the peak; stepped after every optimizer step.

    With peak p (the optimizer's lr), W warm-up steps and T total steps, the rate of step t (from 0) is

        t < W:   warmup_lr + (p - warmup_lr) · t / (W - 1)                   (warmup_lr where W = 1)
        t >= W:  min_lr + (p - min_lr) · (1 + cos(π (t - W) / (T - W))) / 2   (p if constant)

    times the group's `lr_scale`, if it has one. It is the closed form of lightning-bolts'
    `LinearWarmupCosineAnnealingLR`.

    Args:
        optimizer: its groups have the peak as their rate.
        measure: gives W and T, and again when a checkpoint is loaded: a resumed run may have others.
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings, measure: Callable[[], Length]) -> None:
        self.settings, self.measure, self.length = settings, measure, measure()
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        return [group.get("lr_scale", 1.0) * self.rate(peak) for group, peak in zip(groups, self.base_lrs, strict=True)]

    def rate(self, peak: Any) -> Any:
        """The rate of this step, for a group of this peak."""
        step, warmup = self.last_epoch, min(self.length.warmup, self.length.total)
        start, end = self.settings.warmup_lr, self.settings.min_lr
        if step < warmup:
            return start + step * (peak - start) / max(warmup - 1, 1)
        if self.settings.schedule == "constant":
            return peak
        fall = max(self.length.total - warmup, 1)  # a run may end within its warm-up
        return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * (step - warmup) / fall))

    def state_dict(self) -> dict[str, Any]:
        state = {"last_epoch": self.last_epoch, "_step_count": self._step_count}
        return state | {"length": tuple(self.length), "schedule": self.settings.schedule}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Follow the settings of now from the step that the run has reached.

        A warm-up that is over stays over. If the rest of the run has become shorter or longer, as with another batch,
        and its limits are the same, the cosine goes on from where it stands: W moves so that the curve passes through
        there.
        """
        step, before, now = state_dict["last_epoch"], Length(*state_dict["length"]), self.measure()
        start = before.warmup
        if self.settings.schedule == "cosine":
            if state_dict["schedule"] == "constant":
                start = max(start, step)
            elif before.limits == now.limits and start < step < before.total != now.total:
                share = (step - start) / (before.total - start)  # of the fall that is done
                start = (step - share * now.total) / (1 - share)
        self.length = now._replace(warmup=start) if before.warmup <= step else now
        self.last_epoch, self._step_count = step, state_dict["_step_count"]
        self._last_lr = self.get_lr()
        for group, lr, peak in zip(self.optimizer.param_groups, self._last_lr, self.base_lrs, strict=True):
            group["lr"], group["initial_lr"] = lr, peak


def end_after(epochs: int, trainer: Any) -> None:
    """Have a run end after so many epochs, and its schedule with it; schedules of the user's own stay."""
    trainer.fit_loop.max_epochs = epochs
    for each in trainer.lr_scheduler_configs:
        if isinstance(each.scheduler, WarmupSchedule):
            each.scheduler.length = each.scheduler.measure()
