"""What jsonargparse, Lightning and torch refuse, shortened to one line: it names file, key and value, and a remedy."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import lightning
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cait import CONFIGS
from cait.errors import DISK_FULL, UserError, did_you_mean, one_line
from cait.guards.configurations import LINKED, config_files, settings
from cait.settings import flatten

IN_WORDS = {
    "No supported gpu backend found!": "--trainer.accelerator gpu: this machine has no GPU that PyTorch can use; take "
    "auto or cpu, and look at what nvidia-smi says",
    "parameters that were not used in producing the loss": "the network has parameters that the loss does not reach, "
    "which DDP waits for: freeze them, or add --trainer.strategy ddp_find_unused_parameters_true",
}
"""A part of what Lightning says, and what a user needs to know instead."""
REPEATED = ("Does not validate", "Subtypes:", "Errors:", "Given value type:", "Expected a <class 'NoneType'>")
MOST = 100
"""Letters of a line: the value may be an object with all its settings."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn errors of Lightning and torch that a user can mend into a UserError.

    Raises:
        UserError: a setting that Lightning refuses, or too little memory.
    """
    try:
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
        if "class_path" in str(error):  # jsonargparse's, about a class that cannot be made
            words = _shortened(str(error))
        *_, last = traceback.extract_tb(error.__traceback__)
        is_lightnings = Path(lightning.__file__).parent in Path(last.filename).parents
        if words or is_lightnings or isinstance(error, MisconfigurationException):
            raise UserError(words or one_line(error)) from error
        raise


@contextlib.contextmanager
def without_full_disks_of_threads() -> Iterator[None]:
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


def in_restoring(error: BaseException) -> str:
    """What an error says that arose while Lightning put a checkpoint's states back; empty for any other."""
    calls = traceback.extract_tb(error.__traceback__)
    restoring = any(call.filename.endswith("checkpoint_connector.py") and "restore" in call.name for call in calls)
    if isinstance(error, UserError | OSError) or not isinstance(error, Exception) or not restoring:
        return ""
    return f"{type(error).__name__}: {one_line(error)}"


def explain(message: str, arguments: list[str], known: list[str]) -> str:
    """jsonargparse's error, shortened: it has the facts in a text of many lines.

    Args:
        message: what jsonargparse says.
        arguments: verb and options.
        known: every setting, as "model.lr".
    """
    if found := re.search(r"(?:unrecognized arguments: -*|does not accept option ')([^\s=']+)", message):
        return f"{_file_with(found[1], arguments)}there is no setting {found[1]}{_hint(found[1], arguments[0], known)}"
    if found := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', message):
        return f"{found[1]} cannot be set: {LINKED.get(found[1], 'it follows another setting')}"
    if found := re.match(r"Parser key \"config\": .*? '(.*)'", message):
        name = Path(found[1]).name
        files = [str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")]
        return f"--config {name}: there is no such file{did_you_mean(name, files)}"
    if found := re.match(r'Parser key "(.+?)":', message):
        return f"{_file_with(found[1], arguments)}--{found[1]}: {_shortened(message[found.end() :])}"
    return one_line(message)


def _shortened(message: str) -> str:
    """What jsonargparse says of a value, without the types that it lists a second time."""
    lines = [line.strip(" -") for line in message.splitlines()]
    return "; ".join(line[:MOST] for line in lines if line and not line.startswith(REPEATED)).replace(":; ", ": ")


def _hint(word: str, verb: str, known: list[str]) -> str:
    """The end of a message about an unknown setting: what has its last part, or is alike."""
    leaf = word.rpartition(".")[2].replace("-", "_")
    same = [f"--{name}" for name in known if name.rpartition(".")[2] == leaf and "." in name]
    if same and "." not in word:
        return f"; did you mean {' or '.join(same)}?"
    return did_you_mean(f"--{word}", [f"--{name}" for name in known], f"; `cait {verb} --help=all` lists what there is")


def _file_with(key: str, arguments: list[str]) -> str:
    """ "FILE: " if a configuration sets the key and no option does."""
    if any(re.match(rf"--{re.escape(key)}([.=+]|$)", argument) for argument in arguments):
        return ""
    for file in reversed(config_files(arguments)):
        if any(f"{name}.".startswith(f"{key}.") for name in flatten(settings(file))):
            return f"{file}: "
    return ""
