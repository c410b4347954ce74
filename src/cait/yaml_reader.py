"""The reader of YAML for all verbs: a text may be a stranger's, and small as it is grow without end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from cait.errors import UserError, one_line, printable

MOST_BYTES, MOST_NODES, DEEPEST, LONGEST_NUMBER = 1 << 24, 100_000, 50, 1000
"""What a text may have: bytes, values once aliases are expanded, levels, and letters of a number."""
NUMBER = re.compile(r"[-+]?[.\d][-+.\w:]*")


def load(text: str, source: Path | str) -> Any:
    """The value that a YAML text stands for, by the one reader of all verbs. `source` names it in errors.

    Raises:
        UserError: it is no YAML, or `check` refuses it.
    """
    try:
        check(text, source)
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
    """Another reader of YAML, which then refuses what `check` does."""

    def limited_read(text: str) -> Any:
        if "*" in text or len(text) > DEEPEST:
            check(text, "the command line")
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


def check(text: str, source: Path | str) -> None:
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
