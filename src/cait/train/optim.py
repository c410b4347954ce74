"""The optimizer, its parameter groups and the learning rate of every step."""

from __future__ import annotations

import fnmatch
import runpy
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cait import references
from cait.errors import UserError, did_you_mean, one_line
from cait.settings import check_at_least


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its parameter groups."""

    optimizer: str = "adamw"
    """"adamw" is torch's, fused. Any other is timm's, as "lamb", "sgd", "muon" or "lookahead_lion", or
    "package.module:factory", which is called with parameter groups, lr and `optimizer_args`."""
    optimizer_args: dict[str, Any] | None = None
    """Further arguments of the optimizer, as {"momentum": 0.95}."""
    layer_decay: float | None = None
    """Scale the rate of each layer by this factor once for each layer above it, as timm does; None does not."""
    weight_decay: float = 0.05
    """Not for biases, norms, LayerScale, position and class embeddings."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "weight_decay")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay must be above 0 and at most 1, or null; got {self.layer_decay}")

    def build(self, network: nn.Module, lr: float) -> Optimizer:
        """Build the optimizer of a network, with the peak learning rate `lr`.

        Raises:
            UserError: there is no such optimizer, or it does not take these arguments.
        """
        name, given = self.optimizer, dict(self.optimizer_args or {})
        try:
            if name == "adamw":
                given = {"betas": tuple(self.betas), "eps": self.eps, "fused": True, **given}
                optimizer: Any = torch.optim.AdamW(self._groups(network), lr=lr, **given)
            elif references.is_path(name):
                optimizer = references.locate(name)(self._groups(network), lr=lr, **given)
            else:
                decay = dict(weight_decay=self.weight_decay, layer_decay=self.layer_decay)
                optimizer = _timms(network, name, given | dict(lr=lr) | decay)
        except UserError:
            raise
        except Exception as error:  # of many kinds: unknown arguments, packages that are not installed
            raise UserError(f"optimizer {name}: {one_line(error)}") from error
        if not isinstance(optimizer, Optimizer):
            raise UserError(f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return optimizer

    def _groups(self, network: nn.Module) -> list[dict[str, Any]]:
        return param_groups(network, self.weight_decay, self.layer_decay)


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate of every step; see `warmup_cosine`."""

    lr: float = 5e-4
    """Peak learning rate, for `lr_base_size` images a step."""
    lr_base_size: int | None = 512
    """Scale the rate by global batch / lr_base_size, where the global batch counts processes and accumulation; None
    takes `lr` as it is."""
    warmup_epochs: float = 5
    """Length of the linear warm-up."""
    warmup_lr: float = 1e-6
    """Rate of the first step, not scaled."""
    min_lr: float = 1e-5
    """Rate at the end of the cosine, not scaled."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "lr", "warmup_lr", "min_lr", "warmup_epochs")
        if self.lr_base_size is not None and self.lr_base_size < 1:
            raise UserError(f"lr_base_size must be at least 1 or null, got {self.lr_base_size}")

    def peak(self, images: int) -> float:
        """The peak rate for this many images a step."""
        return self.lr if self.lr_base_size is None else self.lr * (images / self.lr_base_size)


def _timms(network: nn.Module, name: str, given: Mapping[str, Any]) -> Optimizer:
    """Build timm's optimizer. Refuse an argument that timm's factory would silently drop."""
    import timm.optim

    known, plain = timm.optim.list_optimizers(), name.rpartition("_")[2]  # "lookahead_lion" is lion
    if plain not in known:
        hint = did_you_mean(name, known, "; `timm.optim.list_optimizers()` lists them")
        raise UserError(f"unknown optimizer {name!r}{hint}")
    info = timm.optim.get_optimizer_info(plain)
    for argument, taken in (("momentum", info.has_momentum), ("eps", info.has_eps), ("betas", info.has_betas)):
        if argument in given and not taken:
            raise UserError(f"optimizer {name} takes no {argument}")
    return timm.optim.create_optimizer_v2(network, opt=name, **given)


def param_groups(network: nn.Module, weight_decay: float, layer_decay: float | None = None) -> list[dict[str, Any]]:
    """Split the trainable parameters into two groups, without and with weight decay.

    Not decayed: biases, every parameter of fewer than two dimensions (norms, LayerScale's λ) and the names in
    `network.no_weight_decay()`. The groups are those of timm's `param_groups_weight_decay`, or with `layer_decay`
    those of its `param_groups_layer_decay`, two for each layer.
    """
    exempt: set[str] = getattr(network, "no_weight_decay", set)()
    if layer_decay is not None:
        from timm.optim import param_groups_layer_decay

        return param_groups_layer_decay(network, weight_decay, exempt, layer_decay=layer_decay)
    plain: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            is_exempt = any(fnmatch.fnmatch(name, pattern) for pattern in exempt)  # timm's names may have wildcards
            is_plain = parameter.ndim <= 1 or name.endswith(".bias") or is_exempt
            (plain if is_plain else decayed).append(parameter)
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: int, total_steps: int, warmup_lr: float, min_lr: float
) -> LRScheduler:
    """Linear warm-up, then a cosine, stepped after every optimizer step.

    With peak p (the optimizer's lr), W warm-up steps and T total steps, the rate of step t (from 0) is

        t < W:   warmup_lr + (p - warmup_lr) · t / (W - 1)      (warmup_lr where W = 1)
        t >= W:  min_lr + (p - min_lr) · (1 + cos(π (t - W) / (T - W))) / 2

    times the group's `lr_scale`, if it has one. The schedule is lightning-bolts' `LinearWarmupCosineAnnealingLR`,
    in its closed form instead of its recursion, so that W = 0 works and rounding does not build up. The rate is a
    function of the step alone, so a checkpoint holds only the step. A resumed run follows the rate, the warm-up and
    the length that it is given now.
    """

    class WarmupCosine(_bolts_schedule()):  # type: ignore[misc]
        def get_lr(self) -> list[float]:
            if self.last_epoch == 0 and self.warmup_epochs > 0:
                rates = [self.warmup_start_lr] * len(self.base_lrs)
            else:
                rates = self._get_closed_form_lr()
            scales = [group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]
            return [rate * scale for rate, scale in zip(rates, scales, strict=True)]

        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self._last_lr = self.get_lr()
            for group, lr, peak in zip(self.optimizer.param_groups, self._last_lr, self.base_lrs, strict=True):
                group["lr"], group["initial_lr"] = lr, peak

    warmup_steps = min(warmup_steps, total_steps)
    return WarmupCosine(
        optimizer,
        warmup_epochs=warmup_steps,
        # A run that ends within its warm-up has no cosine; it must still have a length.
        max_epochs=max(total_steps, warmup_steps + 1),
        warmup_start_lr=warmup_lr,
        eta_min=min_lr,
    )


def _bolts_schedule() -> type[LRScheduler]:
    """lightning-bolts' schedule, loaded from its file alone.

    Importing the package would take seconds, warn, set warning filters, take over Lightning's messages and put names
    back into numpy that numpy has removed.
    """
    file = distribution("lightning-bolts").locate_file("pl_bolts/optimizers/lr_scheduler.py")
    # All that the file takes from its package is a decorator that warns.
    stability = types.ModuleType("pl_bolts.utils.stability")
    vars(stability)["under_review"] = lambda: lambda schedule: schedule
    is_ours = sys.modules.setdefault(stability.__name__, stability) is stability
    try:
        return runpy.run_path(str(file))["LinearWarmupCosineAnnealingLR"]
    finally:
        if is_ours:
            del sys.modules[stability.__name__]
