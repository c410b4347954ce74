"""Hide what Lightning says at every start and need not say."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

# Lightning says these at every start. The user cannot change what they report, or has asked for it.
NOISE = (
    "💡 Tip",
    "GPU available: False",
    "TPU available: False",
    "Seed set to",
    "Loading `train_dataloader`",
    "Trainer already configured with model summary",
    "`Trainer.fit` stopped: `max_",  # the summary says it
)
WARNINGS = (
    r".*LeafSpec.* is deprecated",
    r".*does not have many workers",
    r".*recommended to use `self.log\(.*sync_dist=True",  # torchmetrics has synchronised them
    r"Checkpoint directory .* exists and is not empty",
    r".*Experiment logs directory .* exists and is not empty",
    r"Be aware that when using `ckpt_path`",
    r"You're resuming from a checkpoint that ended before the epoch ended",  # TrainLoader starts where it stopped
    r"`ModelCheckpoint\(monitor=.* could not find the monitored key",  # a run that ends before a validation
    r"Precision .* is not supported by the model summary",
    r".*number of training batches .* is smaller than the logging interval",
)


def hush() -> None:
    """Hide the messages that `NOISE` and `WARNINGS` list."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    keep(lambda record: not record.getMessage().lstrip().startswith(NOISE))


def keep(wanted: Callable[[logging.LogRecord], bool]) -> None:
    """Show only those of Lightning's messages that are `wanted`."""
    for package in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(package).handlers:
            handler.addFilter(wanted)
