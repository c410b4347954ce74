"""The one exception for everything that a user can fix, and the wording that its messages share."""

import difflib
import errno
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from cait import IS_INSTALLED


class UserError(ValueError):
    """Bad input: the message is one line that says what was wrong and what to do.

    The command line prints the message without a traceback and exits with `status`.
    """

    status = 2

    def __str__(self) -> str:
        """On one line, whatever the message quotes. A loader's process puts its traceback before the message."""
        text = super().__str__()
        if is_of_worker(text):
            text = text.splitlines()[-1].partition(": ")[2]
        return " ".join(filter(None, map(str.strip, text.splitlines())))


class OutageError(UserError):
    """A network or a service that does not answer: the same command may work later, so a scheduler may try it again."""

    status = 75  # EX_TEMPFAIL of sysexits.h


class OtherEndedError(UserError):
    """Another process of the run has ended, and says why: that one exits with 2, so a launcher can tell the cause."""

    status = 1


LIBRARIES = (
    os.path.dirname(os.__file__),
    os.path.dirname(__file__),
    str(Path(__file__).parents[2] / "contrib"),
)
"""Folders whose code is not the user's own: Python's, and ours."""
PACKAGES = {"site-packages", "dist-packages"}
"""Names of folders that hold installed packages."""
COMMAND: ContextVar[str] = ContextVar("COMMAND", default="cait")
"""What is typed for `cait`: that, or a console script of the user's own."""
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal obeys, breaks of lines, and the marks that turn the direction of writing."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NAMELESS = (*DISK_FULL, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of a disk that do not name the file."""
CLOSED = "Connection (closed|reset) by peer"
LIMITS = {
    "Too many open files": "raise the limit, as with `ulimit -n 4096`, or lower --data.num_workers",
    "shared memory|Bus error": "enlarge /dev/shm (`docker run --shm-size 8g`), or lower --data.num_workers",
    "Expected more than 1 value per channel": "BatchNorm needs 2 images or more a process, raise --data.batch_size",
    r"killed by signal: \w+|exited unexpectedly": "a loader process has ended, as when memory runs out; lower "
    "--data.num_workers, or take a machine with more memory",
    CLOSED: "another process of the run has ended, and says why",
    "out of memory|can't allocate memory": "lower --data.batch_size or --data.img_size, or add "
    "--model.grad_checkpointing true",
    "Cannot allocate memory": "lower --data.num_workers or --data.batch_size, or take a machine with more memory",
    "No supported gpu backend found": "take --trainer.accelerator auto or cpu, and look at what nvidia-smi says",
    "port: [0-9]+(?=.*EADDRINUSE)": "another program listens there; set MASTER_PORT to another number, or unset it",
    "SyncBatchNorm layers only work with GPU": "leave out --trainer.sync_batchnorm on CPUs",
    "element 0 of tensors does not require grad": "no gradient reaches the network: the loss, or the network "
    "in training, must not detach what it returns, round it or compute it under no_grad",
    "parameters that were not used in producing the loss": "freeze them, or add --trainer.strategy "
    "ddp_find_unused_parameters_true",
}
"""What the system, torch and Lightning say of limits, and what helps."""


def system_error(error: Exception) -> UserError | None:
    """The line for an error about a file, a full disk or a limit of the system; None for any other."""
    text = one_line(error)
    for pattern, remedy in LIMITS.items():
        if match := re.search(pattern, text):
            limit = match[0][0].lower() + match[0][1:]
            error_class = OtherEndedError if pattern == CLOSED else UserError
            return error_class(f"{limit}: {remedy}")
    if isinstance(error, MemoryError):
        return UserError(f"out of memory: {text}".removesuffix(": "))
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(f"cannot use {error.filename}: {error.strerror or text}")
    code_below = getattr(error.__context__, "errno", None)  # torch wraps what a disk says
    for code in NAMELESS:
        if code == code_below or os.strerror(code) in text:
            return UserError(f"cannot use the disk: {os.strerror(code)}")
    return None


def one_line(error: object) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """A name from a file for the screen: without control characters, which terminals obey, and bytes that are no text.

    The marks that turn the direction of writing go too: they can make one name look like another.
    """
    encoded = text.encode(errors="surrogateescape")  # os.fsencode may know ASCII alone
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", encoded.decode(errors="replace"))


def printable_lines(text: str) -> str:
    """`printable` for each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def say(text: str) -> None:
    """Print what may hold names from files."""
    print(printable_lines(text), flush=True)


def tell(line: str) -> None:
    """Say something on the side: what a verb prints may be read by a program."""
    with suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(printable(line), file=sys.stderr, flush=True)


@functools.cache
def tell_once(line: str) -> None:
    """`tell` it in one process of a run, and not again where the same images are divided a second time."""
    # of torchrun, Lightning and srun
    if all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
        tell(line)


def console(**settings: Any) -> Any:
    """A console of rich for what may hold names from files: nothing is markup, an emoji or a terminal's code."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable_lines(text), **options)

    return Plain(markup=False, emoji=False, **settings)


def table_console(width: int, **settings: Any) -> Any:
    """A `console` whose tables keep `width` columns where they are piped into a file."""
    return console(width=None if sys.stdout.isatty() else width, **settings)


def to_type(make: str, cait: str) -> str:
    """The command to name in a message: one of this repository's Makefile under it, else of `cait`."""
    return make if "CAIT_MAKE" in os.environ else as_typed(cait)


def as_typed(text: str) -> str:
    """A text with commands of `cait`, which are those of a console script of the user's own if that was started."""
    return text.replace("cait ", f"{COMMAND.get()} ")


def to_install(packages: str) -> str:
    """The command that installs `packages`, or an optional group of this package, as "[export]"."""
    if packages.startswith("["):
        packages = f"'cait-lightning{packages}'" if IS_INSTALLED else f"--editable '.{packages}'"
    return f"{'' if IS_INSTALLED else '.venv/bin/'}pip install {packages}"


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own files that led to an error, as "my_net.py:12"; empty if there is none.

    A UserError is about a setting, wherever it was raised: only its cause counts. An error may have a line as an
    attribute, if its traceback does not lead there.
    """
    if line := getattr(error, "line_of_user", ""):
        return str(line)
    if not isinstance(error, UserError):
        for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
            path = frame.f_code.co_filename
            if is_own(path):
                return f"{path.removeprefix(os.path.join(os.getcwd(), ''))}:{number}"
    cause = error.__cause__ if error.__suppress_context__ else error.__context__
    return own_line(cause) if cause else ""


def is_own(path: str) -> bool:
    """Whether a file of Python code is the user's own; compiled code has other names, as numpy/random/mtrand.pyx."""
    is_library = path.startswith(LIBRARIES) or not PACKAGES.isdisjoint(Path(path).parts)
    return path.endswith(".py") and not is_library


def is_of_worker(text: str) -> bool:
    """Whether torch has raised an error of this text for a loader's process, whose traceback is in the text."""
    return text.startswith("Caught ") and "Traceback (most recent call last):" in text


def with_own_line(message: str, error: BaseException) -> str:
    """The message of an error, then its `own_line`: "shapes differ (my_net.py:12)"."""
    line = own_line(error)
    return f"{message} ({line})" if line and line not in message else message


def error_line(error: BaseException) -> str:
    """The class of an error, what it says, and its `own_line`: "ValueError: shapes differ (my_net.py:12)"."""
    text = str(error).strip()
    if is_of_worker(text):
        return text.splitlines()[-1]
    return with_own_line(f"{type(error).__name__}: {one_line(text)}".removesuffix(": "), error)


@contextmanager
def told_as(what: str, why: Callable[[Exception], str] | None = None) -> Iterator[None]:
    """Raise a UserError for an error of any class that somebody else's code raises: "the metric f1 fails: ...".

    A UserError passes as it is, and so does a limit of the system, which has a remedy of its own.

    Args:
        what: the beginning of the line, which says what fails.
        why: gives the end of the line from the error; None takes its `error_line`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or system_error(error):
            raise
        end = why(error) if why else f": {error_line(error)}"
        raise UserError(what + end) from error


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", most: int = 1) -> str:
    """The end of a message about an unknown word: "; did you mean x?", or `otherwise` if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first of the names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
