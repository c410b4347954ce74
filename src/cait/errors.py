"""The one exception for everything that a user can fix, and the wording that its messages share."""

import difflib
import errno
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cait import IS_INSTALLED


class UserError(ValueError):
    """Bad input: the message is one line that says what was wrong and what to do.

    The command line prints the message without a traceback and exits with `status`.
    """

    status = 2

    def __str__(self) -> str:
        """On one line, whatever the message quotes. A worker of a DataLoader puts its traceback before the message."""
        text = super().__str__()
        text = found[1].partition(": ")[2] if (found := OF_WORKER.match(text)) else text
        return " ".join(filter(None, map(str.strip, text.splitlines())))


class OutageError(UserError):
    """A network or a service that does not answer: the same command may work later, so a scheduler may try it again."""

    status = 75  # EX_TEMPFAIL of sysexits.h


class OtherEndedError(UserError):
    """Another process of the run has ended, and says why: that one exits with 2, so a launcher can tell the cause."""

    status = 1


OF_WORKER = re.compile(r"(?s)Caught .*Traceback \(most recent call last\):\n(?-s:(?: .*\n)*)(.*)")
"""The message of an error that a process of a DataLoader has raised: its traceback, then its kind and what it says."""
CAUSED = "\nThe above exception was the direct cause of"
"""What follows the traceback of a cause in such a message."""
LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(__file__), str(Path(__file__).parents[2] / "contrib"), "<")
PACKAGES = {"site-packages", "dist-packages"}
"""How the files of others begin, and a folder in which they lie."""
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys, and the marks that turn the direction of writing."""
TRACEBACK = "CAIT_TRACEBACK"
"""The variable that has an error shown with its traceback."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NAMELESS = (*DISK_FULL, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of a disk that do not name the file."""
CLOSED = "Connection (closed|reset) by peer"
LIMITS = {
    "Too many open files": "raise the limit, as with `ulimit -n 4096`, or lower --data.num_workers",
    "shared memory|Bus error": "enlarge /dev/shm (`docker run --shm-size 8g`), or lower --data.num_workers",
    "Expected more than 1 value per channel": "BatchNorm needs 2 images or more a process, raise --data.batch_size",
    "killed by signal: Killed|exited unexpectedly": "a loader process has ended, as when memory runs out; lower "
    "--data.num_workers, or take a machine with more memory",
    CLOSED: "another process of the run has ended, and says why",
    "out of memory|can't allocate memory": "lower --data.batch_size or --data.img_size, or add "
    "--model.grad_checkpointing true",
    "Cannot allocate memory": "lower --data.num_workers or --data.batch_size, or take a machine with more memory",
    "No supported gpu backend found": "take --trainer.accelerator auto or cpu, and look at what nvidia-smi says",
    "SyncBatchNorm layers only work with GPU": "leave out --trainer.sync_batchnorm on CPUs",
    "element 0 of tensors does not require grad": "no gradient reaches the network: the loss, or the network "
    "in training, must not detach what it returns, round it or compute it under no_grad",
    "parameters that were not used in producing the loss": "freeze them, or add --trainer.strategy "
    "ddp_find_unused_parameters_true",
}
"""What the system, torch and Lightning say of limits, and what helps."""


def of_system(error: Exception) -> UserError | None:
    """The line for an error about a file, a full disk or a limit of the system; None for any other."""
    text, cause = one_line(error), error.__context__  # torch wraps what a disk says
    for limit, remedy in LIMITS.items():
        if found := re.search(limit, text):
            kind = OtherEndedError if limit == CLOSED else UserError
            return kind(f"{found[0][0].lower()}{found[0][1:]}: {remedy}")
    if isinstance(error, MemoryError):
        return UserError(f"out of memory{f': {text}' if text else ''}")
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(f"cannot use {error.filename}: {error.strerror or text}")
    for code in NAMELESS:
        if os.strerror(code) in text or (isinstance(cause, OSError) and cause.errno == code):
            return UserError(f"cannot use the disk: {os.strerror(code)}")
    return None


def one_line(error: object) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """A name from a file for the screen: without control characters, which terminals obey, and bytes that are no text.

    The marks that turn the direction of writing go too: they can make one name look like another.
    """
    text = os.fsencode(text).decode(errors="replace")
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def say(text: str) -> None:
    """Print what may hold names from files."""
    print(*map(printable, text.split("\n")), sep="\n", flush=True)


def tell(line: str) -> None:
    """Say something on the side: what a verb prints may be read by a program."""
    with suppress(OSError, ValueError):  # the terminal or the reader has gone
        print(printable(line), file=sys.stderr, flush=True)


@functools.cache
def tell_once(line: str) -> None:
    """`tell` it in one process of a run, and not again where the same images are divided a second time."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell(line)


def console(**settings: Any) -> Any:
    """A console of rich for what may hold names from files: nothing is markup, an emoji or a terminal's code."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    return Plain(markup=False, emoji=False, **settings)


def table_console(width: int, **settings: Any) -> Any:
    """A `console` whose tables keep `width` columns where they are piped into a file."""
    return console(width=None if sys.stdout.isatty() else width, **settings)


def to_type(make: str, cait: str) -> str:
    """The command to name in a message: one of the Makefile to those who have typed one, else of `cait`."""
    return make if "MAKELEVEL" in os.environ else cait  # which make gives to what it starts


def to_install(packages: str) -> str:
    """The command that installs `packages`, or an optional group of this package, as "[export]"."""
    if packages.startswith("["):
        packages = f"'cait-lightning{packages}'" if IS_INSTALLED else f"--editable '.{packages}'"
    return f"{'' if IS_INSTALLED else '.venv/bin/'}pip install {packages}"


def of_own_line(error: BaseException) -> tuple[BaseException, str] | None:
    """The error, or the cause of it, that arose in the user's own files, and the innermost line there: "my_net.py:12".

    Of a UserError the cause counts: it is about a setting, wherever that was given.
    """
    found: BaseException | None = error
    while found is not None:
        for file, number in reversed(_calls(found)):
            is_theirs = file.startswith(LIBRARIES) or not file.endswith(".py")  # compiled, as numpy/random/mtrand.pyx
            if not is_theirs and PACKAGES.isdisjoint(Path(file).parts):
                return found, f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{number}"
        has_context = not (isinstance(found, UserError) or found.__suppress_context__)
        found = found.__cause__ or (found.__context__ if has_context else None)
    return None


def said(error: BaseException) -> str:
    """The kind of an error in somebody else's code, and what it says: "ValueError: no such luck"."""
    found = OF_WORKER.match(str(error))
    return one_line(found[1] if found else f"{type(error).__name__}: {error}").rstrip(": ")


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Say what fails, as "the metric f1 fails", before an error of any kind that somebody else's code raises."""
    try:
        yield
    except Exception as error:
        # A limit of the system has a remedy of its own. torch raises a loader's death in whatever line is running.
        if isinstance(error, UserError) or of_system(error) or "DataLoader worker" in str(error):
            raise
        raise UserError(f"{what}: {said(error)}") from error


def _calls(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call that led to an error, the outermost first; of a loader's UserError its cause's."""
    text = BaseException.__str__(error)
    calls = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, UserError):
        calls, text = [], text.rpartition(CAUSED)[0]
    elif isinstance(error, SyntaxError) and error.filename:
        calls.append((error.filename, error.lineno or 0))
    if OF_WORKER.match(text):
        calls += [(file, int(number)) for file, number in re.findall(r'^ *File "(.+)", line (\d+)', text, re.MULTILINE)]
    return calls


def in_a_line(error: Exception) -> UserError | None:
    """What to print of an error in place of its traceback; None if it is neither the user's nor the system's.

    Notes that were added to it, or to its cause, come last.
    """
    known = error if isinstance(error, UserError) else of_system(error)
    notes = getattr(error, "__notes__", None) or getattr(error.__cause__, "__notes__", [])
    if not (own := of_own_line(error)):
        return type(known)("; ".join([str(known), *notes])) if known else None
    cause, place = own
    line, kind = str(known or said(cause)), said(cause).partition(":")[0]
    words = (place,) if isinstance(cause, UserError) else (kind, place)  # a UserError says the kind of its cause
    missing = ", ".join(word for word in words if word not in line)
    told = "; ".join([f"{line}{missing and f' ({missing})'}", f"{TRACEBACK}=1 shows all of it", *notes])
    return type(known or UserError())(told)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", most: int = 1) -> str:
    """The end of a message about an unknown word: "; did you mean x?", or `otherwise` if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else otherwise


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first of the names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
