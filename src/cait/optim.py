"""AdamW's parameter groups and the learning rate of every step."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into two groups, without and with weight decay.

    Not decayed: biases, every parameter of fewer than two dimensions (norms, LayerScale's λ) and
    the names in `model.no_weight_decay()`. The same groups as timm's `param_groups_weight_decay`.
    """
    names_of = getattr(model, "no_weight_decay", set)  # a method, in timm's models too
    exempt: set[str] = names_of()
    plain: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_plain = parameter.ndim <= 1 or name.endswith(".bias") or name in exempt
            (plain if is_plain else decayed).append(parameter)
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: int, total_steps: int, warmup_lr: float, min_lr: float
) -> LRScheduler:
    """Linear warm-up, then a cosine, stepped after every optimiser step.

    With peak p (the optimiser's lr), W warm-up steps and T total steps, step t (from 0) is taken at

        t < W:   warmup_lr + (p - warmup_lr) · t / (W - 1)      (warmup_lr where W = 1)
        t >= W:  min_lr + (p - min_lr) · (1 + cos(π (t - W) / (T - W))) / 2

    The schedule is lightning-bolts' `LinearWarmupCosineAnnealingLR`, read from its closed form at
    every step instead of by its recursion: W = 0 then works, rounding does not build up, and the
    rate is a function of the step alone, so a checkpoint holds nothing but the step and a resumed
    run follows the rate, the warm-up and the length that it is given now.
    """
    # Recorded, that is swallowed: lightning-bolts warns that it is under review and that pkg_resources is
    # old, and in being imported it sets filters that would undo an "ignore".
    with warnings.catch_warnings(record=True):
        from pl_bolts.optimizers.lr_scheduler import LinearWarmupCosineAnnealingLR

    class WarmupCosine(LinearWarmupCosineAnnealingLR):
        def get_lr(self) -> list[float]:
            if self.last_epoch == 0 and self.warmup_epochs > 0:
                return [self.warmup_start_lr] * len(self.base_lrs)
            return self._get_closed_form_lr()

        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self._last_lr = self.get_lr()
            for group, lr, peak in zip(self.optimizer.param_groups, self._last_lr, self.base_lrs, strict=True):
                group["lr"], group["initial_lr"] = lr, peak

    warmup_steps = min(warmup_steps, total_steps)
    with warnings.catch_warnings(record=True):
        return WarmupCosine(
            optimizer,
            warmup_epochs=warmup_steps,
            # A run that ends within its warm-up has no cosine; it must still have a length.
            max_epochs=max(total_steps, warmup_steps + 1),
            warmup_start_lr=warmup_lr,
            eta_min=min_lr,
        )
