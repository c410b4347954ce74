"""The optimizer and its parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    """Further arguments of the optimizer, as {"betas": [0.9, 0.95]}."""
    layer_decay: float | None = None
    """Scale the rate of each layer by this factor once for each layer above it, as timm does; None does not."""
    weight_decay: float | None = None
    """Not for biases, norms, LayerScale, position and class embeddings. None takes 0.05, the paper's, for adamw, and 0
    for any other optimizer."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "weight_decay")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay must be above 0 and at most 1, or null; got {self.layer_decay}")

    def build(self, network: nn.Module, lr: float) -> Optimizer:
        """Build the optimizer of a network. Raises UserError if there is none, or it takes other arguments."""
        name, given = self.optimizer, dict(self.optimizer_args or {})
        default = 0.05 if name == "adamw" else 0.0
        weight_decay = default if self.weight_decay is None else self.weight_decay
        decay: dict[str, Any] = dict(weight_decay=weight_decay, layer_decay=self.layer_decay)
        try:
            if name == "adamw":
                optimizer: Any = torch.optim.AdamW(param_groups(network, **decay), lr=lr, **{"fused": True} | given)
            elif references.is_path(name):
                optimizer = references.locate(name)(param_groups(network, **decay), lr=lr, **given)
            else:
                optimizer = _timms(network, name, given | dict(lr=lr) | decay)
        except UserError:
            raise
        except Exception as error:  # of many kinds: unknown arguments, packages that are not installed
            raise UserError(f"optimizer {name}: {one_line(error)}") from error
        if not isinstance(optimizer, Optimizer):
            raise UserError(f"{name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return optimizer

    def apply(self, states: list[dict[str, Any]], before: Mapping[str, Any], network: nn.Module, lr: float) -> None:
        """Put these settings into the states of a checkpoint's optimizers, if they have changed.

        A schedule of your own may change betas or the weight decay of a group, so else they stay.

        Args:
            states: of the optimizers.
            before: the hyper-parameters of the checkpoint's run.

        Raises:
            UserError: it is another optimizer.
        """
        remedy = "start a new run from its weights with --model.weights"
        if (name := before.get("optimizer", self.optimizer)) != self.optimizer:
            raise UserError(f"the checkpoint's optimizer is {name}, this one {self.optimizer}; {remedy}")
        groups, settings = self.build(network, lr).param_groups, {"lr_scale", "fused"}
        if any(before.get(name) != value for name, value in asdict(self).items()):
            settings |= {"weight_decay", "betas", "eps", *(self.optimizer_args or {})}
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
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _timms(network: nn.Module, name: str, given: Mapping[str, Any]) -> Optimizer:
    known = timm.optim.list_optimizers()
    if name.rpartition("_")[2] not in known:  # "lookahead_lion" is lion
        otherwise = "; `timm.optim.list_optimizers()` lists them"
        raise UserError(f"unknown optimizer {name!r}{did_you_mean(name, known, otherwise)}")
    return timm.optim.create_optimizer_v2(network, opt=name, **given)


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
    return timm.optim.param_groups_layer_decay(network, weight_decay, exempt, layer_decay=layer_decay)
