"""Your own parts, named in a configuration as `package.module:name`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from cait.errors import UserError, did_you_mean, kind_and_place, one_line

PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_limits: ContextVar[tuple[tuple[Sequence[str], str], ...]] = ContextVar("limits", default=())
"""(paths that `locate` may import, remedy) of each `only` around this thread's code."""


def is_path(name: str) -> bool:
    """Whether `name` is written as `package.module:name`."""
    return PATH.fullmatch(name) is not None


def paths_in(text: str) -> list[str]:
    """Every `package.module:name` in a text."""
    return PATH.findall(text)


def locate(path: str) -> Any:
    """Import the object at `path`, such as "my_network:Net".

    Raises:
        UserError: no such module, no such name in it, or `only` does not allow it.
    """
    module, _, name = path.partition(":")
    for allowed, remedy in _limits.get():
        if path not in allowed:
            raise UserError(f"the run names {path}, code that may do anything: {remedy}")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"cannot import {path}: {error}; modules are found in the current folder too") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            hint = did_you_mean(part, dir(found))
            raise UserError(f"cannot import {path}: {module} has no {name!r}{hint}") from error
    return found


def made(path: str, *args: Any, **kwargs: Any) -> Any:
    """What the object at `path` returns when it is called. Raises UserError if that fails; it says how and where."""
    make = locate(path)
    try:
        return make(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:  # of many kinds: it is the user's code
        is_within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        reason = kind_and_place(error) if is_within else one_line(error)  # else it takes other arguments
        raise UserError(f"cannot make {path}: {reason}") from error


@contextmanager
def only(allowed: Sequence[str], remedy: str) -> Iterator[None]:
    """Let `locate` import nothing but these paths, in this thread; the error ends with `remedy`."""
    token = _limits.set((*_limits.get(), (allowed, remedy)))
    try:
        yield
    finally:
        _limits.reset(token)
