"""The one exception for everything that a user can fix, and the wording that its messages share."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one line that says what was wrong and what to do.

    The command line prints the message without a traceback and exits with status 2.
    """


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def of_file(error: OSError) -> UserError | None:
    """The line for an error about a file, such as a missing permission, or about a full disk; None for any other."""
    if error.filename is None and error.errno not in DISK_FULL:  # a full disk gives no name
        return None
    return UserError(f"cannot use {error.filename or 'the disk'}: {error.strerror or one_line(error)}")


def one_line(error: object) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def printable(name: str) -> str:
    """A name for the screen, without control characters and bytes that are not text."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def kind_and_place(error: Exception) -> str:
    """What an error in somebody else's code says, and where: "ValueError: no such luck (my_net.py:12)"."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {one_line(error)} ({last.filename}:{last.lineno})"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", most: int = 1) -> str:
    """The end of a message about an unknown word: "; did you mean x?", or `otherwise` if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else otherwise
