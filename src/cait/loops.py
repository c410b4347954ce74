"""Lightning's loops: where a run stands in them, and how many steps are left of it.

All that is relied on in them beyond Lightning's documented interface is here; tests/run/test_canaries.py tries it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cait.ckpt import Checkpoint

Counter = dict[str, Any]
"""The state of one of Lightning's counters: "total" and "current", each with "ready", "started" and so on."""


class Position(NamedTuple):
    """A place between two batches of a run.

    Lightning's counters depend on the hook in which they are read, and count an epoch as a whole one if the run stops
    within it. A position is the same in every hook.
    """

    epoch: int
    """Whole epochs done."""
    batch: int
    """Batches done of the epoch after them."""
    step: int
    """Optimizer steps done."""

    @classmethod
    def of(cls, trainer: Any) -> Position:
        """Where a Trainer stands."""
        epochs, batches = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
        return cls._counted(epochs.state_dict(), batches.state_dict(), trainer.global_step)

    @classmethod
    def saved(cls, checkpoint: Checkpoint) -> Position:
        """Where the run of a checkpoint stood."""
        loops, step = checkpoint["loops"]["fit_loop"], int(checkpoint["global_step"])
        return cls._counted(loops["epoch_progress"], loops["epoch_loop.batch_progress"], step)

    @classmethod
    def _counted(cls, epochs: Counter, batches: Counter, step: int) -> Position:
        begun, done = epochs["current"]["started"], batches["current"]["processed"]
        return cls(begun, 0, step) if batches["is_last_batch"] else cls(max(0, begun - 1), done, step)


def continue_run(checkpoint: Checkpoint, trainer: Any, images_before: int = 1, images_now: int = 1) -> None:
    """Change the counters of a checkpoint, so that a Trainer goes on with the batch that comes next.

    After a stop within an accumulation the run goes on from its last whole step. If batches, over all processes, had
    other numbers of images, it goes on at the image that it had reached, or before it, where a step begins.
    """
    if "loops" not in checkpoint:
        return
    epoch, batch, step = Position.saved(checkpoint)
    loops = checkpoint["loops"]["fit_loop"]
    batches = loops["epoch_loop.batch_progress"]
    done, total = (count * images_before // images_now for count in (batch, batches["total"]["ready"]))
    repeated = done % accumulated(trainer, epoch)
    if done >= batches_an_epoch(trainer):  # an epoch has become shorter than what is done of it
        epoch, done, repeated = epoch + 1, 0, 0
    done, amid = done - repeated, done > repeated
    for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
        counts |= dict.fromkeys(("ready", "started"), epoch + amid) | dict.fromkeys(("processed", "completed"), epoch)
    # As in `on_train_batch_end`: the batch is processed. If a validation was due after it, that is done too.
    for counts, count in ((batches["total"], total - repeated), (batches["current"], done)):
        counts |= dict.fromkeys(("ready", "started", "processed"), count) | {"completed": count - amid}
    batches["is_last_batch"] = not amid
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - amid


def next_batch(trainer: Any) -> int:
    """The place in the epoch of the next batch: while Lightning moves a batch to the device, that batch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def logged_step(trainer: Any) -> int:
    """Which step of the run is under way, counted from 1, as Lightning counts for its loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped + 1


def validates_next(trainer: Any) -> bool:
    """In `on_train_batch_end`: whether a validation follows."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def accumulates(trainer: Any) -> bool:
    """After a batch: whether its gradients wait for those of the next."""
    return trainer.fit_loop._should_accumulate()


def ask_nobody_about_signals(trainer: Any) -> None:
    """Keep Lightning from asking all processes before every batch whether to stop: each would wait for its device."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def end_steps_once(trainer: Any) -> None:
    """Have `end_step` and `end_epoch` do what Lightning does only after the hooks that save; Lightning then skips it.

    There it logs a step's metrics, and steps a schedule that follows a metric. A kill in between would lose both,
    because the checkpoint says that the step is done.
    """
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    connector.update_train_step_metrics = _once_a_batch(loop, connector.update_train_step_metrics)
    loop.update_lr_schedulers = _once_a_batch(loop, loop.update_lr_schedulers)


def end_step(trainer: Any) -> None:
    trainer._logger_connector.update_train_step_metrics()
    trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def end_epoch(trainer: Any) -> None:
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)


def _once_a_batch(loop: Any, function: Callable[..., None]) -> Callable[..., None]:
    """The function, which does nothing if it is called again with the same arguments after the same batch."""
    done: dict[Any, int] = {}

    def once(*arguments: Any, **named: Any) -> None:
        call, batch = (arguments, *named.items()), loop.batch_progress.total.ready
        if done.get(call) != batch:
            done[call] = batch
            function(*arguments, **named)

    return once


def begin(trainer: Any) -> None:
    """In `on_train_start`: what Lightning does not restore."""
    position = Position.of(trainer)
    if position.batch == 0:
        # With `max_steps` Lightning would take the first batch of the new epoch for a validated one.
        trainer.fit_loop.epoch_loop.restarting = False
    trainer.accumulate_grad_batches = accumulated(trainer, position.epoch)


def validate(trainer: Any) -> None:
    """Validate at the start of training, as after an epoch."""
    trainer.validating = True  # so that Lightning takes the metrics for those of a validation
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def accumulation(trainer: Any) -> dict[int, int]:
    """The batches of an optimizer step, by the epoch from which on they count."""
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):  # Lightning's GradientAccumulationScheduler
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
    position = Position.of(trainer)
    if epochs <= position.epoch:
        return position.step
    if math.isinf(batches := batches_an_epoch(trainer)):
        return math.inf
    each = {first: math.ceil(batches / count) for first, count in accumulation(trainer).items()}
    of_this = each[max(first for first in each if first <= position.epoch)]
    steps: float = position.step - min(of_this, math.ceil(position.batch / accumulated(trainer, position.epoch)))
    for (first, count), end in zip(each.items(), [*each, math.inf][1:], strict=True):
        steps += count * max(0, min(epochs, end) - max(first, position.epoch))
    return max(steps, position.step)


def total_steps(trainer: Any) -> float:
    """Optimizer steps of the whole run, those that are done included; infinity if it has no end."""
    total = math.inf
    if trainer.max_epochs not in (None, -1):
        total = steps_until(trainer, trainer.max_epochs)
    if trainer.max_steps != -1:
        total = min(total, max(trainer.max_steps, trainer.global_step))
    return total
