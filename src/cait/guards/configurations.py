"""The configurations that a command line names: which files they are, and whether each is one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cait import CONFIGS, disk, plugins, signature, yaml_reader
from cait.errors import UserError

LINKED = {
    "model.img_size": "give --data.img_size",
    "model.mean": "give --data.mean",
    "model.std": "give --data.std",
    "model.num_classes": "it is the number of the data's classes",
    "model.task": "the data say it",
    "data.in_chans": "give --model.fields.in_chans",
    "data.seed": "give --seed_everything",
}
"""Settings that follow another, and what to do instead."""


class SavedConfig(NamedTuple):
    """A configuration of a command line, read once: what was checked is what is used."""

    text: str
    own: bool
    """Whether this account has signed it."""
    limit: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]] | None = None
    """Called with its settings and the names of all that there are; returns those that may be used."""


def join_values(arguments: Iterable[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`; the file is found by `found`."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--config", "-c") and not argument.startswith("-"):
            joined[-1] = f"--config={argument}"
        else:
            joined.append(re.sub("^-c=", "--config=", argument))
    return [re.sub("(?s)^--config=(.*)", lambda given: f"--config={found(given[1])}", word) for word in joined]


def files_first(arguments: Iterable[str]) -> list[str]:
    """`join_values` with every --config before the other options, which win over it wherever they stand."""
    words = join_values(arguments)
    start = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:start] + sorted(words[start:], key=lambda word: not word.startswith("--config="))


def found(name: str) -> str:
    """The file that --config names: from the working directory, else among the package's, as digits.yaml."""
    packaged = os.path.join(CONFIGS, name.removeprefix(f"{CONFIGS.name}/"))
    return packaged if os.path.isfile(packaged) and not os.path.exists(name) else name


def options(arguments: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """The options by name, each with its value as it is typed, `--name=value` or `--name value`; None for a flag."""
    for word, following in pairwise([*arguments, "--"]):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            yield name, value if has_value else None if following.startswith("--") else following


def configurations_of(arguments: Iterable[str]) -> list[str]:
    """What `--config` names: files, or YAML itself."""
    return [word.removeprefix("--config=") for word in join_values(arguments) if word.startswith("--config=")]


def config_files(arguments: Iterable[str]) -> list[Path]:
    """The files that `--config` names."""
    named = map(Path, configurations_of(arguments))
    return [path for path in named if len(path.name) < 256 and path.is_file()]


def recipe(arguments: Iterable[str]) -> str:
    """The name of the last file of `--config` that is no overlay; empty if there is none."""
    named = map(Path, reversed(configurations_of(arguments)))
    return next((path.stem for path in named if not is_overlay(path)), "")


def check_run_name(name: str) -> None:
    """Raise UserError if a run cannot be called that."""
    if not re.fullmatch(r"\w[\w.=+-]*", name):
        raise UserError(f"a run's name is made of letters, digits and . _ - + =, and is not a path: {name!r}")


def is_overlay(path: Path) -> bool:
    """Whether a configuration says where a run trains and logs, and not what it is.

    It then lies in a folder `trainer`, or sets what an extra adds and, at most, the Trainer.
    """
    if path.parent.name == "trainer":
        return True
    try:
        content = yaml_reader.load(read_text(path), path)
    except (OSError, UserError):  # no file or no YAML, which the parser reports
        return False
    added = {setting.name.partition(".")[0] for setting in plugins.settings()}
    return isinstance(content, dict) and bool(content.keys() & added) and content.keys() <= added | {"trainer"}


def read(path: Path) -> SavedConfig:
    """Read a configuration, once. Raises UserError if it is no text."""
    text = read_text(path)
    return SavedConfig(text, signature.is_own(text))


def read_text(path: Path) -> str:
    """The text of a configuration. Raises UserError if it is no text."""
    return disk.read_text(path, yaml_reader.MOST_BYTES)


def settings(path: Path, text: str | None = None) -> dict[str, Any]:
    """The settings in a configuration.

    Args:
        text: what it holds, if that has been read already.

    Raises:
        UserError: it is no YAML, holds no settings, or sets one that follows another.
    """
    content = yaml_reader.load(read_text(path) if text is None else text, path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a configuration: it holds no settings, as `model:` and `  lr: 1.0e-3` below it")
    groups = {group: part for group, part in content.items() if isinstance(part, dict)}
    for name in (f"{group}.{key}" for group, part in groups.items() for key in part):
        if name in LINKED:  # the parser would silently ignore it
            raise UserError(f"{path}: {name} cannot be set: {LINKED[name]}")
    return content
