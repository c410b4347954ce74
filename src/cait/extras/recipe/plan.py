"""After the first validation: plan the epochs of a run anew, by the pace that it has."""

import time
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from cait.ckpt import Checkpoint
from cait.errors import UserError
from cait.extras.display import duration
from cait.extras.recipe.figures import most_epochs
from cait.loops import Position, batches_a_step, batches_an_epoch
from cait.plugins import Run
from cait.train.optim import end_after

WARM_UP = 3
"""Batches before the clock starts: workers are started, and kernels chosen."""
END = 3.0
"""Seconds from the last step to the end of the run."""


class Plan(Callback):
    """Plans as many epochs as fit into `plan_minutes`.

    A trial before the run would wait for it, and be wrong once other work on the machine begins or ends. Checkpoints
    hold the plan, so that a resumed run keeps it; a `--trainer.max_epochs` that is given later wins, and a
    `--plan_minutes` plans once more.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.minutes = run.config.plan_minutes
        if not self.minutes > 0:
            raise UserError(f"plan_minutes must be above 0 or null, got {self.minutes:g}")
        self.first: int = run.trainer.max_epochs
        """The epochs that were planned before."""
        is_typed = "trainer.max_epochs" in run.typed and "plan_minutes" not in run.typed
        self.epochs: int | None = self.first if is_typed else None
        """Those that are planned now, or typed beside minutes of a file."""
        self.step, self.before = 0, self.first
        """The steps that were done then, and the epochs that were planned until then."""
        self._batches = 0
        self._since = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("first", "epochs", "step", "before")}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Checkpoint) -> None:
        kept = checkpoint["callbacks"].get(self.state_key)
        if "plan_minutes" in self.run.typed:  # it goes on to the next validation at least
            every = trainer.check_val_every_n_epoch or 1
            until = (Position.saved(checkpoint).epoch // every + 1) * every
            trainer.fit_loop.max_epochs = max(trainer.max_epochs or 0, until)
        elif kept and ("trainer.max_epochs" in self.run.typed or kept["first"] != self.first):
            self.epochs = self.first
        elif kept and kept["epochs"]:
            self.epochs = trainer.fit_loop.max_epochs = kept["epochs"]
            self.step = kept.get("step", 0)
            self.before = kept.get("before", self.first)

    def on_train_batch_end(self, *_: Any) -> None:
        self._batches += 1
        if self._batches == WARM_UP:
            self._since = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        done = trainer.current_epoch + 1
        every = trainer.check_val_every_n_epoch or 1
        if self.epochs is not None or done % every or self._batches <= WARM_UP:
            return
        now = time.monotonic()
        batches = batches_an_epoch(trainer)
        # its part of a validation included
        epoch = (now - self._since) / (self._batches - WARM_UP) * batches
        left = self.run.program.begun + 60 * self.minutes - END - now
        from_weights = bool(pl_module.settings.weights or pl_module.settings.pretrained)
        most = max(
            done,
            self.first,
            most_epochs(from_weights, batches / batches_a_step(trainer)) // every * every,
        )
        fitting = done + max(0, int(left / (every * epoch))) * every
        self.epochs = trainer.strategy.broadcast(min(most, fitting))
        if self.epochs != trainer.max_epochs:
            reason = (
                f"because one takes {epoch:.1f} s"
                if fitting <= most
                else "no more, whatever the time"
            )
            noun = "epoch" if self.epochs == 1 else "epochs"
            rank_zero_info(
                f"planned anew: {self.epochs} {noun}, {reason}; about {duration((self.epochs - done) * epoch)} to go"
            )
        self.step = trainer.global_step
        self.before = trainer.max_epochs
        end_after(self.epochs, trainer)
