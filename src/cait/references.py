"""Your own parts, named in a configuration as `package.module:name`."""

import importlib
import re
from typing import Any

from cait.errors import UserError, did_you_mean, told_as

TIMM = "timm/"
"""Before the name of a network of timm's."""
PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def is_path(name: str) -> bool:
    """Whether `name` is written as `package.module:name`, and so names code. Nothing else is imported."""
    return PATH.fullmatch(name) is not None


def locate(path: str) -> Any:
    """Import the object at `path`, such as "my_network:Net". Raises UserError if there is none."""
    if not is_path(path):  # `cait.signature` would have taken it for a plain text
        raise UserError(f"cannot import {path!r}: write it as package.module:name")
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"cannot import {path}: {error}; modules are found in the current folder too"
        ) from error
    for attribute in name.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError as error:
            hint = did_you_mean(attribute, dir(value))
            raise UserError(f"cannot import {path}: {module} has no {name!r}{hint}") from error
    return value


def name_of(cls: type) -> str:
    """The path by which `locate` finds a class, or the name alone of one in a script, which cannot be imported."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return path if is_path(path) and cls.__module__ != "__main__" else cls.__qualname__


def subclass(path: str, base: type) -> type:
    """The class at `path`. Raises UserError if it is no subclass of `base`."""
    cls = locate(path)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"{path} is no subclass of cait.{base.__name__}")
    return cls


def overridden(cls: type, base: type, *names: str) -> list[str]:
    """Those of the methods of `base` that a subclass has replaced."""
    return [name for name in names if getattr(cls, name) is not getattr(base, name)]


def made(path: str, *args: Any, **kwargs: Any) -> Any:
    """What the object at `path` returns when it is called. Raises UserError if that fails; it says how and where."""
    make = locate(path)
    with told_as(f"cannot make {path}"):
        return make(*args, **kwargs)
