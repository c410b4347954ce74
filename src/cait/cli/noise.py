"""What Lightning says at every start or resume, and the user cannot change or has asked for."""

import logging
import re
import warnings

from cait.errors import printable_lines

MESSAGES = re.compile(
    r"\s*(\[rank: \d+\] )?("  # any process but the first names itself
    "💡 Tip"
    "|GPU available: False"
    "|TPU available: False"
    "|Seed set to"
    "|Loading `train_dataloader`"
    "|Trainer already configured with model summary"
    "|`Trainer.fit` stopped: `max_)"  # the summary says it
)
WARNINGS = (
    "Be aware that when using `ckpt_path`"  # an extra whose callback has a state in the checkpoint may be gone
    "|You're resuming from a checkpoint that ended before the epoch ended"  # the loader starts where it stopped
    "|.*LeafSpec.* is deprecated"
    "|.*does not have many workers"
    "|The `srun` command is available"  # what srun must start is known before, see `Processes.cluster`
    "|Checkpoint directory .* exists and is not empty"
    r"|`ModelCheckpoint\(monitor=.* could not find the monitored key"  # a run that ends before a validation
    "|.*number of training batches .* is smaller than the logging interval"
)


def hide() -> None:
    warnings.filterwarnings("ignore", WARNINGS)
    for package in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(package).handlers:
            handler.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether to show what Lightning, or we through it, say; names from files are made `printable`."""
    text = record.getMessage()
    record.msg = printable_lines(text)
    record.args = ()
    return not MESSAGES.match(text)
