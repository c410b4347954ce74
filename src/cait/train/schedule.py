"""The learning rate of every step: a linear warm-up, then a cosine or the peak."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from typing import Any, Literal, NamedTuple, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cait.errors import UserError
from cait.settings import check_at_least, check_choice

Shape = Literal["cosine", "constant"]


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate of every step; see `WarmupSchedule`."""

    lr: float = 5e-4
    """Peak learning rate, for `lr_base_size` images a step."""
    lr_base_size: int | None = 512
    """Scale the rate by global batch / lr_base_size, where the global batch counts processes and accumulation; None
    takes `lr` as it is."""
    warmup_epochs: float = 5
    """Length of the linear warm-up."""
    warmup_lr: float = 1e-6
    """Rate of the first step, not scaled."""
    schedule: Shape = "cosine"
    """After the warm-up: "cosine" falls to `min_lr`, "constant" keeps the peak. A run that kept the peak and is resumed
    with "cosine" falls from the step that it has reached."""
    min_lr: float = 1e-5
    """Rate at the end of the cosine, not scaled."""

    def __post_init__(self) -> None:
        check_choice(self, {"schedule": get_args(Shape)})
        check_at_least(self, 0, "lr", "warmup_lr", "min_lr", "warmup_epochs")
        if self.lr_base_size is not None and self.lr_base_size < 1:
            raise UserError(f"lr_base_size must be at least 1 or null, got {self.lr_base_size}")


class Length(NamedTuple):
    """How long a schedule is, in optimizer steps from the beginning of the run."""

    warmup: int | float
    total: int
    limits: tuple[int, int] = (-1, -1)
    """What it follows from: max_epochs and max_steps."""


def _bolts_schedule() -> type[LRScheduler]:
    """lightning-bolts' schedule, loaded from its file alone: the package would take seconds, warn and patch numpy."""
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


class WarmupSchedule(_bolts_schedule()):  # type: ignore[misc]
    """Linear warm-up, then a cosine or the peak; stepped after every optimizer step.

    With peak p (the optimizer's lr), W warm-up steps and T total steps, the rate of step t (from 0) is

        t < W:   warmup_lr + (p - warmup_lr) · t / (W - 1)                   (warmup_lr where W = 1)
        t >= W:  min_lr + (p - min_lr) · (1 + cos(π (t - W) / (T - W))) / 2   (p if constant)

    times the group's `lr_scale`, if it has one. The cosine is lightning-bolts' `LinearWarmupCosineAnnealingLR` in its
    closed form, so that W = 0 works and rounding does not build up.

    Args:
        optimizer: its groups have the peak as their rate.
        settings: the rates and the shape.
        measure: gives W and T, and again when a checkpoint is loaded: a resumed run may have others.
    """

    def __init__(self, optimizer: Optimizer, settings: ScheduleSettings, measure: Callable[[], Length]) -> None:
        self.settings, self.measure = settings, measure
        self.set_length(measure())
        super().__init__(optimizer, self.warmup_epochs, self.max_epochs, settings.warmup_lr, settings.min_lr)

    def set_length(self, length: Length) -> None:
        self.length = length
        self.warmup_epochs = min(length.warmup, length.total)
        # A run that ends within its warm-up has no cosine; it must still have a length.
        self.max_epochs = max(length.total, self.warmup_epochs + 1)

    def get_lr(self) -> list[float]:
        if self.last_epoch == 0 and self.warmup_epochs > 0:
            rates = [self.warmup_start_lr] * len(self.base_lrs)
        elif self.last_epoch < self.warmup_epochs or self.settings.schedule == "cosine":
            rates = self._get_closed_form_lr()
        else:
            rates = self.base_lrs
        scales = [group.get("lr_scale", 1.0) for group in self.optimizer.param_groups]
        return [rate * scale for rate, scale in zip(rates, scales, strict=True)]

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
                start = moved(start, step, before.total, now.total)
        self.set_length(now._replace(warmup=start) if before.warmup <= step else now)
        self.last_epoch, self._step_count = step, state_dict["_step_count"]
        self._last_lr = self.get_lr()
        for group, lr, peak in zip(self.optimizer.param_groups, self._last_lr, self.base_lrs, strict=True):
            group["lr"], group["initial_lr"] = lr, peak


def moved(start: float, step: int, end: int, new_end: int) -> float:
    """Where a fall to `new_end` starts that at `step` has come as far as the one from `start` to `end`."""
    share = (step - start) / (end - start)
    return (step - share * new_end) / (1 - share)
