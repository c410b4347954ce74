"""The reader of YAML for all verbs: a text may be a stranger's, and small as it is grow without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cait.errors import UserError, one_line, printable

MOST_BYTES, DEEPEST = 1 << 20, 50
"""What a text may have: bytes, and levels."""


class Loader(yaml.CSafeLoader):
    """Builds plain values alone, and refuses a key that is there twice: YAML would keep only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise _refused(f"{key.value} is there twice", key)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def load(text: str, source: Path | str) -> Any:
    """The value that a YAML text stands for. `source` names it in errors.

    Raises:
        UserError: it is no YAML, or `check` refuses it.
    """
    try:
        check(text)
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        line = text.splitlines()[mark.line : mark.line + 1] if mark else []
        tab = "; indent with spaces, not with tabs" if "\t" in "".join(line) else ""
        raise UserError(f"{source} is not YAML{place}: {error.problem or error.context}{tab}") from error
    except Exception as error:  # a value may have a tag that it does not fit, as `!!int x`
        raise UserError(f"{source} is not YAML: {one_line(error)}") from error


def check(text: str) -> None:
    """Refuse a text before it is built: one that is deep, or has control characters or aliases, which may grow.

    Raises:
        MarkedYAMLError: it says where.
    """
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _refused(f"it has more than {DEEPEST} levels", event)
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"in the place of *{event.anchor} write what it stands for", event)
        if isinstance(event, yaml.ScalarEvent) and printable(plain := " ".join(event.value.split())) != plain:
            raise _refused("a control character", event)


def _refused(problem: str, place: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
