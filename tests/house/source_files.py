"""The files of the source, and what is in them."""

import ast
import functools

from harness import REPO

SOURCE = REPO / "src/cait"
FILES = [path for path in SOURCE.rglob("*.py") if "tests" not in path.parts]
CORE = [path for path in FILES if not path.is_relative_to(SOURCE / "extras")]
CONTRIB = [path for path in (REPO / "contrib").rglob("*.py") if path.parent.name != "tests"]
"""Parts for few; they may be removed."""


@functools.cache
def nodes(path):
    """The nodes of a file's syntax tree, also those within functions."""
    return [*ast.walk(ast.parse(path.read_text()))]


def strings(path):
    constants = [node.value for node in nodes(path) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def imports(path):
    """What a file imports of the package and of contrib, as "cait.errors.UserError" and as "cait.errors"."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith(("cait.", "contrib."))}
