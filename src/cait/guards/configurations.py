"""The configurations that a command line names: which files they are, and whether each is one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError

from cait import CONFIGS, disk, plugins, signature
from cait.errors import UserError, one_line, printable

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
MOST_BYTES, MOST_NODES, DEEPEST, LONGEST_NUMBER = 1 << 24, 100_000, 50, 1000
"""What a YAML text may have: bytes, values once aliases are expanded, levels, and letters of a number."""
NUMBER = re.compile(r"[-+]?[.\d][-+.\w:]*")


class SavedConfig(NamedTuple):
    """A configuration of a command line, read once: what was checked is what is used."""

    text: str
    own: bool
    """Whether this account has signed it."""
    limit: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]] | None = None
    """Called with its settings and the names of all that there are; returns those that may be used."""


_NEGATIVE = re.compile(r"-\.?\d[\d_]*\.?\d*(e[+-]?\d+)?", re.IGNORECASE)


def join_values(arguments: Iterable[str]) -> list[str]:
    """`--config FILE` as `--config=FILE`, and `--model.lr -1e-3` as `--model.lr=-1e-3`.

    A file of --config is found by `found`. argparse would take a negative number for an option.
    """
    joined: list[str] = []
    for argument in arguments:
        option = joined[-1] if joined else ""
        if option in ("--config", "-c") and not argument.startswith("-"):
            joined[-1] = f"--config={argument}"
        elif _NEGATIVE.fullmatch(argument) and re.fullmatch(r"--[^=]+", option):
            joined[-1] += f"={argument}"
        else:
            joined.append(re.sub("^-c=", "--config=", argument))
    return [re.sub("(?s)^--config=(.*)", lambda given: f"--config={found(given[1])}", word) for word in joined]


def found(name: str) -> str:
    """The file that --config names: from the working directory, else among the package's, as digits.yaml."""
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise UserError(f"--config {name} is not a regular file")
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
        content = load(read_text(path), path)
    except (OSError, UserError):  # no file or no YAML, which the parser reports
        return False
    added = {setting.name.partition(".")[0] for setting in plugins.settings()}
    return isinstance(content, dict) and bool(content.keys() & added) and content.keys() <= added | {"trainer"}


def read(path: Path) -> SavedConfig:
    """Read a configuration, once. Raises UserError if it is no text."""
    text = read_text(path)
    return SavedConfig(text, signature.is_own(path, text))


def read_text(path: Path) -> str:
    """The text of a configuration. Raises UserError if it is no text."""
    try:
        return disk.read_text(path, MOST_BYTES)
    except UserError as error:
        reason = one_line(error).replace(f"{path} is no text", "it holds bytes that are no text")
        raise UserError(f"{path} is not a configuration: {reason.replace(str(path), 'it')}") from error


def settings(path: Path, text: str | None = None) -> dict[str, Any]:
    """The settings in a configuration.

    Args:
        text: what it holds, if that has been read already.

    Raises:
        UserError: it is no YAML or holds no settings, has a key twice or sets one that follows another.
    """
    content = load(read_text(path) if text is None else text, path)
    if content is None:
        raise UserError(f"{path} is not a configuration: it is empty")
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a configuration: it holds no settings, as `model:` and `  lr: 1.0e-3` below it")
    groups = {group: part for group, part in content.items() if isinstance(part, dict)}
    for name in (f"{group}.{key}" for group, part in groups.items() for key in part):
        if name in LINKED:  # the parser would silently ignore it
            raise UserError(f"{path}: {name} cannot be set: {LINKED[name]}")
    return content


def load(text: str, source: Path | str) -> Any:
    """The value that a YAML text stands for, by the one reader of all verbs. `source` names it in errors.

    Raises:
        UserError: it is no YAML, or `check_yaml` refuses it.
    """
    try:
        check_yaml(text, source)
        return yaml.load(text, Loader=yaml.CSafeLoader)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        line = text.splitlines()[mark.line : mark.line + 1] if mark else []
        tab = "; indent with spaces, not with tabs" if "\t" in "".join(line) else ""
        kind = "a configuration: " if isinstance(error, ConstructorError) else f"YAML{place}: "
        raise UserError(f"{source} is not {kind}{error.problem or error.context}{tab}") from error
    except Exception as error:  # a value may have a tag that it does not fit, as `!!int x`
        raise UserError(f"{source} is not YAML: {one_line(error)}") from error


def limited(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of YAML that refuses what `check_yaml` does."""

    def limited_read(text: str) -> Any:
        if "*" in text or len(text) > DEEPEST:
            with contextlib.suppress(yaml.YAMLError):  # `read` says it in its own way
                check_yaml(text, "the command line")
        return read(text)

    return limited_read


class _Collection:
    """A mapping or a list of a YAML text that is being read.

    Args:
        event: its start.
        name: the settings that lead to it, as "model.fields.".
        before: nodes of the text in front of it.
    """

    def __init__(self, event: Any, name: str, before: int) -> None:
        self.anchor, self.name, self.before = event.anchor, name, before
        self.is_mapping, self.keys, self.key = isinstance(event, yaml.MappingStartEvent), set[str](), name.rstrip(".")
        self._at_key = True

    def repeats(self, event: Any) -> bool:
        """Take the next node; whether it is a key that was there before."""
        self._at_key = not (is_key := self._at_key and self.is_mapping)
        if not is_key:
            return False
        self.key = self.name + str(getattr(event, "value", ""))
        twice = isinstance(event, yaml.ScalarEvent) and self.key in self.keys and event.value != "<<"
        self.keys.add(self.key)
        return twice


def check_yaml(text: str, source: Path | str) -> None:
    """Refuse a text before it is built: one that grows, contains itself, has a key twice or a control character.

    Raises:
        UserError: it names `source` and the line.
    """
    nodes, sizes, around = 0, dict[str, int](), list[_Collection]()
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionEndEvent):
            closed = around.pop()
            sizes[closed.anchor] = nodes - closed.before
        if not isinstance(event, yaml.NodeEvent):
            continue
        if around and around[-1].repeats(event):
            raise UserError(f"{source} has {around[-1].key} twice, at line {line} again; YAML would keep only the last")
        if isinstance(event, yaml.AliasEvent) and any(event.anchor == each.anchor for each in around):
            raise UserError(f"{source} is not a configuration: a part of it contains itself, at line {line}")
        nodes += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(_Collection(event, f"{around[-1].key}." if around and around[-1].key else "", nodes - 1))
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            _check_scalar(event, source, line)
        if nodes > MOST_NODES or len(around) > DEEPEST:
            what = f"more than {MOST_NODES:,} values" if nodes > MOST_NODES else f"more than {DEEPEST} levels"
            raise UserError(f"{source} is not a configuration: it has {what}, at line {line}")


def _check_scalar(event: yaml.ScalarEvent, source: Path | str, line: int) -> None:
    if (value := re.sub("[\n\t]", "", event.value)) != printable(value):
        raise UserError(f"{source} holds a control character, in line {line}")
    if len(event.value) > LONGEST_NUMBER and (event.implicit[0] or event.tag) and NUMBER.fullmatch(event.value):
        raise UserError(f"{source} is not a configuration: line {line} has a number of {len(event.value):,} digits")
