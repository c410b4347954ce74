"""Where a run stands in Lightning's loops, and how many steps are left of it.

docs/resume.md lists what is used of Lightning beyond its documented interface, each with the test that tries it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

from cait.ckpt import Checkpoint, State
from cait.errors import UserError

POSITION = "position"
"""Key of the position in checkpoints."""
STOP = "should_stop"
"""Key of whether the run was asked to stop, and went on for `min_epochs` or `min_steps` alone."""
Counter = State
"""The state of one of Lightning's counters: "total" and "current", each with "ready", "started" and so on."""


class Position(NamedTuple):
    """A place between two batches of a run, the same in whatever hook it is asked for."""

    epoch: int
    """Whole epochs done."""
    batch: int
    """Batches done of the epoch after them."""
    step: int
    """Optimizer steps done."""

    @classmethod
    def now(cls, trainer: Any) -> Position:
        """Where a Trainer stands."""
        loop = trainer.fit_loop
        batches = loop.epoch_loop.batch_progress.state_dict()
        return _counted(loop.epoch_progress.state_dict(), batches, trainer.global_step)

    @classmethod
    def saved(cls, checkpoint: Checkpoint) -> Position:
        """Where the run of a checkpoint stood."""
        if POSITION in checkpoint:
            return cls(*checkpoint[POSITION])
        counters = checkpoint["loops"]["fit_loop"]  # version 0.1.0 saved Lightning's counters alone
        batches = counters["epoch_loop.batch_progress"]
        return _counted(counters["epoch_progress"], batches, int(checkpoint["global_step"]))


def _counted(epochs: Counter, batches: Counter, step: int) -> Position:
    """The position by Lightning's counters. An epoch that has begun is counted as started until it is over."""
    started = epochs["current"]["started"]
    current = batches["current"]
    if batches["is_last_batch"] and current["ready"] == current["processed"]:
        return Position(started, 0, step)
    return Position(max(0, started - 1), current["processed"], step)


def loops_state(at: Position, batches: int) -> State:
    """The state of Lightning's fit loop from which it goes on at a position.

    Amid an epoch it is as Lightning has it in `on_train_batch_end`: the last batch is processed, but not completed, and
    its step is not logged. A validation that was due after it counts as done.

    Args:
        batches: those done in all epochs.
    """
    pending = 1 if at.batch else 0
    begun = at.epoch + pending
    epochs = {"ready": begun, "started": begun, "processed": at.epoch, "completed": at.epoch}
    return {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.batch_progress": {
            "total": _processed(batches, pending),
            "current": _processed(at.batch, pending),
            "is_last_batch": at.batch == 0 and at.epoch > 0,
        },
        "epoch_loop.state_dict": {"_batches_that_stepped": at.step - pending},
    }


def _processed(count: int, pending: int) -> dict[str, int]:
    return {"ready": count, "started": count, "processed": count, "completed": count - pending}


def continue_run(
    checkpoint: Checkpoint, trainer: Any, images_before: int = 1, images_now: int = 1
) -> None:
    """Change a checkpoint, so that a Trainer goes on with the batch that comes next.

    After a stop within an accumulation the run goes on from its last whole step. If batches, over all processes, had
    other numbers of images, it goes on at the image that it had reached, or before it, where a step begins.
    """
    if "loops" not in checkpoint:
        return
    trainer.should_stop = checkpoint.get(STOP, False)
    counters = checkpoint["loops"]["fit_loop"]
    at = Position.saved(checkpoint)
    batch = at.batch * images_before // images_now
    batches = (
        counters["epoch_loop.batch_progress"]["total"]["processed"] * images_before // images_now
    )
    if batch >= batches_an_epoch(trainer):  # an epoch has become shorter than what is done of it
        at = at._replace(epoch=at.epoch + 1, batch=0)
    else:
        repeated = batch % accumulated(trainer, at.epoch)
        at = at._replace(batch=batch - repeated)
        batches -= repeated
    if not trainer.lightning_module.automatic_optimization:
        at = at._replace(step=batches)  # Lightning counts one for the loggers, whatever has stepped
    counters |= loops_state(at, batches)


def waits_to_stop(trainer: Any) -> bool:
    """Whether the run was asked to stop, and goes on for `min_epochs` or `min_steps` alone."""
    return bool(trainer.should_stop) and not trainer.fit_loop._can_stop_early


def next_batch(trainer: Any) -> int:
    """The place in the epoch of the next batch: while Lightning moves a batch to the device, that batch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def ask_nobody_about_signals(trainer: Any) -> None:
    """Keep Lightning from asking all processes before every batch whether to stop: each would wait for its device."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def start_where_told(trainer: Any) -> None:
    """Keep Lightning from its own search for a checkpoint, by which a new run would go on with another's."""
    trainer._checkpoint_connector._parse_ckpt_path = lambda _, ckpt_path, **__: ckpt_path


def keep_scored_images(trainer: Any) -> None:
    """Keep Lightning from rounding images that are scored to the precision of training: `cait eval` does not."""
    plugin = trainer.precision_plugin
    convert = plugin.convert_input
    plugin.convert_input = lambda batch: convert(batch) if trainer.training else batch


def begin(trainer: Any) -> None:
    """In `on_train_start`: what Lightning does not restore."""
    position = Position.now(trainer)
    loop = trainer.fit_loop
    loop._restarting = (
        False  # else a schedule that follows a metric would leave out the end of this epoch
    )
    if position.batch == 0:
        # With `max_steps` Lightning would go on with the validation, and count a step for the loggers after it.
        loop.epoch_loop.restarting = False
    trainer.accumulate_grad_batches = accumulated(trainer, position.epoch)


def validate(trainer: Any) -> None:
    """Validate at the start of training, as after an epoch."""
    trainer.validating = True  # so that Lightning takes the metrics for those of a validation
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def accumulation(trainer: Any) -> dict[int, int]:
    """The batches of an optimizer step, by the epoch from which on they count."""
    for callback in trainer.callbacks:
        # Lightning's GradientAccumulationScheduler
        if hasattr(callback, "get_accumulate_grad_batches"):
            return dict(sorted(callback.scheduling.items()))
    return {0: trainer.accumulate_grad_batches}


def accumulated(trainer: Any, epoch: int) -> int:
    """The batches of an optimizer step in an epoch."""
    return next(count for first, count in reversed(accumulation(trainer).items()) if first <= epoch)


def batches_an_epoch(trainer: Any) -> float:
    """Batches of a training epoch; infinity if the loader has no length."""
    if trainer.train_dataloader is None:  # Lightning has not counted them
        trainer.fit_loop.setup_data()
    return trainer.num_training_batches


def batches_a_step(trainer: Any) -> int:
    """Batches of an optimizer step; each epoch ends in one, so there are no more than the epoch has."""
    return int(min(accumulated(trainer, 0), batches_an_epoch(trainer)))


def steps_until(trainer: Any, epochs: float) -> float:
    """Optimizer steps from the beginning of the run to the end of `epochs` epochs; at least those that are done.

    Epochs that are done count as they were, the others as the Trainer's settings make them.
    """
    position = Position.now(trainer)
    if epochs <= position.epoch:
        return position.step
    batches = batches_an_epoch(trainer)
    if math.isinf(batches):
        return math.inf

    def steps_of(epoch: int, batches: float) -> int:
        return math.ceil(batches / accumulated(trainer, epoch))

    begun = steps_of(position.epoch, min(batches, position.batch))
    steps: float = position.step - begun  # at the start of this epoch
    for first, end in pairwise([*accumulation(trainer), math.inf]):
        count = min(epochs, end) - max(first, position.epoch)
        steps += max(0, count) * steps_of(int(first), batches)
    return max(steps, position.step)


def total_steps(trainer: Any) -> float:
    """Optimizer steps of the whole run, those that are done included; infinity if it has no end."""
    total = math.inf
    if trainer.max_epochs not in (None, -1):
        total = steps_until(trainer, trainer.max_epochs)
    if trainer.max_steps != -1:
        total = min(total, max(trainer.max_steps, trainer.global_step))
    return total


def check_least(trainer: Any, total: float) -> None:
    """Refuse `min_epochs` and `min_steps` beyond the `total` steps of the run: they hold off only an early end."""
    least = max(steps_until(trainer, trainer.min_epochs or 0), trainer.min_steps or 0)
    if least > total and not trainer.fast_dev_run:
        raise UserError(
            f"the run ends after {total} steps, before the {least} of --trainer.min_epochs or min_steps: "
            "lower them, or raise max_epochs or max_steps"
        )
