"""What Lightning and torch refuse once a verb runs, in one line."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import lightning
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cait.errors import DISK_FULL, UserError, one_line

IN_WORDS = {
    "No supported gpu backend found!": "--trainer.accelerator gpu: this machine has no GPU that PyTorch can use; take "
    "auto or cpu, and look at what nvidia-smi says",
    "parameters that were not used in producing the loss": "the network has parameters that the loss does not reach, "
    "which DDP waits for: freeze them, or add --trainer.strategy ddp_find_unused_parameters_true",
}
"""A part of what Lightning says, and what a user needs to know instead."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors that a user can mend into a UserError, and report a full disk once.

    Raises:
        UserError: a setting that Lightning refuses, or too little memory.
    """
    try:
        with _without_full_disks_of_threads():
            yield
    except UserError:
        raise
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        if re.search(r"out of memory|can't allocate memory", str(error)):
            size = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
            raise UserError(
                f"out of memory{f' ({size[0].lower()})' if size else ''}: lower --data.batch_size or --data.img_size, "
                "take a smaller model, or add --model.grad_checkpointing true"
            ) from error
        words = next((words for said, words in IN_WORDS.items() if said in str(error)), None)
        if words or isinstance(error, MisconfigurationException) or _is_lightnings(error):
            raise UserError(words or one_line(error)) from error
        raise


def in_restoring(error: BaseException) -> str:
    """What an error says that arose while a checkpoint's states were put back; empty for any other."""
    calls = traceback.extract_tb(error.__traceback__)
    restoring = any(
        Path(call.filename).name == "checkpoint_connector.py" and "dump" not in call.name and "save" not in call.name
        for call in calls
    )
    if isinstance(error, UserError | OSError) or not isinstance(error, Exception) or not restoring:
        return ""
    return f"{type(error).__name__}: {one_line(error)}"


def _is_lightnings(error: Exception) -> bool:
    """Whether Lightning itself raised the error, and not code that it calls."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(lightning.__file__).parent in Path(last.filename).parents


@contextlib.contextmanager
def _without_full_disks_of_threads() -> Iterator[None]:
    """Hide the traceback of TensorBoard's writing thread: the run itself reports a full disk in one line."""
    before = threading.excepthook

    def tell(given: threading.ExceptHookArgs) -> None:
        if not (isinstance(given.exc_value, OSError) and given.exc_value.errno in DISK_FULL):
            before(given)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = before
