"""How the images of an optimizer step are divided into batches, over processes and accumulation."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from cait.errors import UserError


def images_a_batch(images: int, even: bool, trainer: Trainer) -> int:
    """The images of each batch, if a step of `images` images is shared out over processes and accumulated batches.

    Raises:
        UserError: the parts are not even, or of an odd number of images although `even` is asked for.
    """
    parts = trainer.world_size * trainer.accumulate_grad_batches
    batch_size, left = divmod(images, parts)
    if left or batch_size < 1 or (even and batch_size % 2):
        raise UserError(
            f"--data.batch_size {images} cannot be shared out over {parts} batches (processes × "
            f"accumulation){', each of an even number for Mixup and CutMix' if even else ''}; "
            "change it or the number of devices, or set --data.global_batch false"
        )
    return batch_size


def batches_a_step(images: int, batch_size: int, trainer: Trainer) -> int:
    """The batches of `batch_size` that each process accumulates for steps of `images` images over all processes.

    Args:
        trainer: one that has not started yet.

    Raises:
        UserError: the result is not a whole number, or the Trainer already accumulates.
    """
    given, callbacks = trainer.accumulate_grad_batches, trainer.callbacks  # type: ignore[attr-defined]
    if given != 1 or any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        how = f"--trainer.accumulate_grad_batches {given}" if given != 1 else "a GradientAccumulationScheduler"
        raise UserError(f"--data.global_batch {images} chooses how many batches are accumulated; leave out {how}")
    processes = trainer.world_size
    parts = processes * batch_size
    batches, left = divmod(images, parts)
    if left or not batches:
        fitting = [str(parts * count) for count in (batches, batches + 1) if count]
        raise UserError(
            f"--data.global_batch {images} is not a multiple of {processes} process{'es' * (processes > 1)} × "
            f"--data.batch_size {batch_size}: take {' or '.join(fitting)}, or another batch_size"
        )
    rank_zero_info(f"global batch {images} = {processes} × {batch_size} images × {batches} accumulated")
    return batches
