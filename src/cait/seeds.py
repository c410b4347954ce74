"""Random streams by name: what a run draws is a function of its seed and of where it is.

Checkpoints hold no generator's state. A resumed run seeds its generators from these functions and goes on to the
same bits, so the numbers that they return must not change.
"""

from hashlib import blake2b


def image(seed: int, epoch: int, index: int, repeat: int) -> int:
    """Augmentation of image `index` in an epoch, one of its `repeat`s."""
    return _mix(seed, epoch, index, repeat)


def stand_in(seed: int, epoch: int, index: int, repeat: int, attempt: int) -> int:
    """Choice of the image that replaces an unreadable one; attempts count from 1."""
    return _mix(seed, epoch, index, repeat, attempt)


def batch_mixing(seed: int, epoch: int, step: int, rank: int) -> int:
    """Mixup and CutMix of a batch; 32 bits, as numpy's global generator takes them."""
    return _mix(seed, epoch, step, rank) % 2**32


def training_step(seed: int, epoch: int, step: int, rank: int) -> int:
    """Dropout, stochastic depth and what a user draws in a training step; every process has its own.

    Step -1 is the start of the epoch. Epochs below 0 are validations.
    """
    return _mix(seed, epoch, step, rank, 1)  # the 1 sets it apart from `batch_mixing`


def batch_transfer(seed: int, epoch: int, step: int, rank: int) -> int:
    """What a data module of the user's own draws while a batch moves to the device."""
    return _mix(seed, epoch, step, rank, 2)


def epoch_order(seed: int, epoch: int) -> int:
    """Order of the images in an epoch, the same for all processes."""
    return seed + epoch  # as torch's and timm's distributed samplers do


def _mix(*numbers: int) -> int:
    """One 64-bit seed from several numbers; near numbers give unrelated seeds."""
    return int.from_bytes(blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest())
