"""The optimizer, its parameter groups, and the learning rate of every step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import timm.optim
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cait import references
from cait.ckpt import State
from cait.errors import UserError, told_as
from cait.settings import Group, In, Needs, NonNegativeFloat, PositiveInt, Settings, as_text, values


@dataclass(frozen=True)
class OptimizerSettings(Group):
    """The optimizer and its parameter groups."""

    optimizer: str = "adamw"
    """"adamw" is torch's, fused. Any other is timm's, as "lamb", "sgd", "muon" or "lookahead_lion", or
    "package.module:factory", which is called with parameter groups, lr and `optimizer_args`."""
    optimizer_args: Settings | None = None
    """Further arguments of the optimizer, as {"betas": [0.9, 0.95]}."""
    layer_decay: Annotated[float | None, In("(0, 1]")] = None
    """Scale the rate of each layer by this factor once for each layer above it, as timm does; None does not."""
    weight_decay: NonNegativeFloat | None = None
    """Not for biases, norms, LayerScale, position and class embeddings. None takes 0.05, the paper's, for adamw, and 0
    for any other optimizer."""

    def build_optimizer(
        self, network: nn.Module, lr: float, beside: Sequence[Tensor] = ()
    ) -> Optimizer:
        """Build the optimizer of a network, and of what learns beside it, as a loss, without weight decay.

        Raises UserError if there is none, or it takes other arguments.
        """
        name = self.optimizer
        arguments = self.optimizer_args or {}
        is_adamw = name.lower() == "adamw"
        weight_decay = self.weight_decay
        if weight_decay is None:
            weight_decay = 0.05 if is_adamw else 0.0
        with told_as(f"optimizer {name}"):  # unknown arguments, packages that are not installed
            if is_adamw or references.is_path(name):
                make: Any = (
                    partial(torch.optim.AdamW, fused=True) if is_adamw else references.locate(name)
                )
                optimizer = make(
                    param_groups(network, weight_decay, self.layer_decay), lr=lr, **arguments
                )
            else:
                ours = dict(lr=lr, weight_decay=weight_decay, layer_decay=self.layer_decay)
                optimizer = timm.optim.create_optimizer_v2(network, opt=name, **arguments | ours)
            if not isinstance(optimizer, Optimizer):
                raise UserError(
                    f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
                )
            inspect.signature(optimizer.step).bind(closure=None)  # as Lightning calls it
            if beside:
                optimizer.add_param_group({"params": [*beside], "weight_decay": 0.0})
        if getattr(optimizer, "is_second_order", False):
            raise UserError(
                f"optimizer {name} needs second derivatives, which a run does not have; take another"
            )
        return optimizer

    def try_step(self, device: torch.device) -> None:
        """Raise UserError if the optimizer refuses to step on this device; tried on a tiny network."""
        network = nn.utils.skip_init(nn.Linear, 2, 2, device=device)
        optimizer = replace(self, layer_decay=None).build_optimizer(network, 1e-3)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with told_as(
            f"optimizer {self.optimizer} cannot step on {device.type} with --model.optimizer_args "
            f"{as_text(self.optimizer_args)}: leave them out, or take another"
        ):
            optimizer.step()

    def apply(self, states: list[State], before: State, groups: list[State]) -> None:
        """Put these settings into the states of a checkpoint's optimizers, if they have changed.

        A schedule of your own may change betas or the weight decay of a group, so else they stay.

        Raises UserError if it is another optimizer.

        Args:
            before: hyper-parameters of the checkpoint's run.
            groups: those of the optimizer that goes on.
        """
        remedy = "start a new run from its weights with --model.weights"
        name = before.get("optimizer", self.optimizer)
        if name != self.optimizer:
            raise UserError(
                f"the checkpoint's optimizer is {name}, this one {self.optimizer}; {remedy}"
            )
        changed = self._changed(before)
        for state in states:
            saved = state["param_groups"]
            if not begins_with(state, groups):
                raise UserError(
                    f"the checkpoint's optimizer has groups of {_sizes(saved)} parameters, "
                    f"not {_sizes(groups)}; {remedy}"
                )
            for old, new in zip(saved, groups, strict=False):
                old |= {name: new[name] for name in changed & new.keys()}
            _lay_out(
                state["state"], [parameter for group in groups for parameter in group["params"]]
            )

    def _changed(self, before: State) -> set[str]:
        """The names in a parameter group that these settings decide, where those of a run `before` were others."""
        names = {"lr_scale", "fused"}
        if any(
            before.get(name) != value for name, value in values(self, OptimizerSettings).items()
        ):
            names |= {"weight_decay", "betas", "eps"}
            names |= (self.optimizer_args or {}).keys() | (
                before.get("optimizer_args") or {}
            ).keys()
        return names


def begins_with(state: State, groups: list[State]) -> bool:
    """Whether the state of an optimizer begins with such groups."""
    return _sizes(state["param_groups"])[: len(groups)] == _sizes(groups)


def _sizes(groups: list[State]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _lay_out(state: dict[int, State], parameters: list[Tensor]) -> None:
    """Give each moment its parameter's memory format: the fused AdamW takes the numbers of both as they lie."""
    for index, parameter in enumerate(parameters):
        moments = state.get(index, {})
        for name, value in moments.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                moments[name] = laid_out.copy_(value)


def param_groups(
    network: nn.Module, weight_decay: float, layer_decay: float | None = None
) -> list[State]:
    """timm's groups of the trainable parameters: without and with weight decay, with `layer_decay` two for each layer.

    Not decayed: biases, every parameter of fewer than two dimensions (norms, LayerScale's λ) and the names in
    `network.no_weight_decay()`.
    """
    exempt: Any = getattr(network, "no_weight_decay", set)()
    if layer_decay is None:
        # A decay of 0 would give a single group, and no checkpoint could change it.
        groups = timm.optim.param_groups_weight_decay(network, 1.0, no_weight_decay_list=exempt)
        return [group | {"weight_decay": group["weight_decay"] * weight_decay} for group in groups]
    if not hasattr(network, "group_matcher"):
        raise UserError(
            f"{type(network).__name__} names no layers, which layer_decay needs: give it group_matcher()"
        )
    return timm.optim.param_groups_layer_decay(
        network, weight_decay, exempt, layer_decay=layer_decay
    )


@dataclass(frozen=True)
class ScheduleSettings(Group):
    """The learning rate of every step; see `WarmupSchedule`."""

    lr: NonNegativeFloat = 5e-4
    """Peak learning rate, for `lr_base_size` images a step."""
    lr_base_size: PositiveInt | None = 512
    """Scale the rate by global batch / lr_base_size, where the global batch counts processes and accumulation; None
    takes `lr` as it is."""
    warmup_epochs: NonNegativeFloat = 5
    """Length of the linear warm-up."""
    warmup_lr: Annotated[NonNegativeFloat, Needs("a warm-up", "warmup_epochs")] = 1e-6
    """Rate of the first step, not scaled."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: "cosine" falls to `min_lr`, "constant" keeps the peak. A run that kept the peak and is resumed
    with "cosine" falls from the step that it has reached."""
    min_lr: Annotated[
        NonNegativeFloat,
        Needs("--model.schedule cosine", "schedule", lambda schedule: schedule == "cosine"),
    ] = 1e-5
    """Rate at the end of the cosine, not scaled."""


class Length(NamedTuple):
    """How long a schedule is, in optimizer steps from the beginning of the run."""

    warmup: int | float
    total: int
    limits: tuple[int, int] = (-1, -1)
    """What it follows from: max_epochs and max_steps."""

    def bent_through(self, step: int, before: Length) -> Length:
        """This length, with a W' of its own, so that the cosine of W and T `before` goes on at `step` where it stands.

        At step t it has done the share s = (t - W) / (T - W) of its fall, and has to have done it of the new total T':

            (t - W') / (T' - W') = s,   so   W' = (t - s · T') / (1 - s)
        """
        share = (step - before.warmup) / (before.total - before.warmup)
        return self._replace(warmup=(step - share * self.total) / (1 - share))


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
        step: the first step; a Trainer that fits once more goes on where it stands.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: ScheduleSettings,
        measure: Callable[[], Length],
        step: int = 0,
    ) -> None:
        self.settings = settings
        self.measure = measure
        self.length = measure()
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        super().__init__(optimizer, step - 1)

    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        return [
            group.get("lr_scale", 1.0) * self.rate(peak)
            for group, peak in zip(groups, self.base_lrs, strict=True)
        ]

    def rate(self, peak: Any) -> Any:
        """The rate of this step, for a group of this peak."""
        settings = self.settings
        step = self.last_epoch
        warmup = min(self.length.warmup, self.length.total)  # a run may end within its warm-up
        if step < warmup:
            return settings.warmup_lr + step * (peak - settings.warmup_lr) / max(warmup - 1, 1)
        if settings.schedule == "constant":
            return peak
        fall = max(self.length.total - warmup, 1)
        height = 1 + math.cos(math.pi * (step - warmup) / fall)  # from 2 to 0
        return settings.min_lr + 0.5 * (peak - settings.min_lr) * height

    def state_dict(self) -> State:
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "length": tuple(self.length),
            "schedule": self.settings.schedule,
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Follow the settings of now from the step that the run has reached."""
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self.length = self._length_after(Length(*state_dict["length"]), state_dict["schedule"])
        self._last_lr = self.get_lr()
        for group, lr, peak in zip(
            self.optimizer.param_groups, self._last_lr, self.base_lrs, strict=True
        ):
            group |= {"lr": lr, "initial_lr": peak}

    def _length_after(self, before: Length, shape: str) -> Length:
        """The length from this step on, where it was `before` under a schedule of this shape."""
        step = self.last_epoch
        now = self.measure()
        if step < before.warmup:
            return now
        # A warm-up that is over stays over.
        over = now._replace(warmup=before.warmup)
        if self.settings.schedule == "constant":
            return over
        if shape == "constant":  # the cosine begins here
            return now._replace(warmup=step)
        # as with another batch
        rest_alone_changed = before.limits == now.limits and before.total != now.total
        is_falling = before.warmup < step < before.total
        return now.bent_through(step, before) if rest_alone_changed and is_falling else over


def end_after(epochs: int, trainer: Any) -> None:
    """Have a run end after so many epochs, and its schedule with it; schedules of the user's own stay."""
    trainer.fit_loop.max_epochs = epochs
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, WarmupSchedule):
            config.scheduler.length = config.scheduler.measure()
