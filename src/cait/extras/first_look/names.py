"""The settings of `fit` and `eval`, read from the source of the classes that take them, without importing torch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from cait import plugins
from cait.cli.options import SETTINGS
from cait.guards.configurations import LINKED

PACKAGE = __name__.partition(".")[0]
TRAINER = "lightning.pytorch.trainer.trainer"
METHODS = {"fit": "fit", "eval": "validate"}
"""The Trainer's method that does a verb's work; its parameters are settings too."""
NOT_SETTINGS = ("model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")
"""Parameters of these methods that LightningCLI gives."""


class NotCertainError(Exception):
    """The source does not say what a class takes."""


def settings(verb: str) -> list[str]:
    """Every setting and group of settings, as "model" and "model.lr"; in the order of the parser.

    Raises:
        NotCertainError: the source of a class does not say which it takes.
    """
    groups = {
        "trainer": parameters(TRAINER, "Trainer"),
        "model": [
            *parameters(f"{PACKAGE}.train.module", "CaiTModule"),
            *(name for path in plugins.of_kind("MODEL_SETTINGS") for name in _fields(*path.split(":"))),
        ],
        "data": [
            *parameters(f"{PACKAGE}.data.datamodule", "ImageNetDataModule"),
            *(name for path in plugins.of_kind("DATA_SETTINGS") for name in _fields(*path.split(":"))),
        ],
        "ema": parameters(f"{PACKAGE}.train.ema", "EMA"),
    }
    added = {name: parameters(*path.split(":")) for name, path in plugins.merged("CALLBACK_SETTINGS").items()}
    taken = [each.name for each in (*SETTINGS, *plugins.settings()) if not each.verbs or verb in each.verbs]
    single = [part for name in taken for part in (name.partition(".")[0], name)]  # "early_stop" is a group
    method = [name for name in parameters(TRAINER, "Trainer", METHODS[verb]) if name not in NOT_SETTINGS]
    found = ["config", "seed_everything", *_joined(groups), *single, *_joined(added), *method]
    return [name for name in dict.fromkeys(found) if name not in LINKED]


def _joined(groups: dict[str, list[str]]) -> Iterator[str]:
    for group, names in groups.items():
        yield group
        yield from (f"{group}.{name}" for name in names)


def parameters(module: str, name: str, method: str = "__init__") -> list[str]:
    """The parameters of a class's method; those that are dataclasses of the package stand for their fields.

    Raises:
        NotCertainError: there is no such class, or it takes any name.
    """
    for node in _class(module, name).body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            if node.args.vararg or node.args.kwarg:
                raise NotCertainError(f"{name} takes any name")
            given = [*node.args.args[1:], *node.args.kwonlyargs]
            return [inner for each in given for inner in _expanded(module, each.arg, each.annotation)]
    raise NotCertainError(f"{name} has no {method} of its own")


def _fields(module: str, name: str) -> list[str]:
    """The fields of a dataclass."""
    found: list[str] = []
    node = _class(module, name)
    for base in node.bases:
        found += _fields(*_place(module, ast.unparse(base)))
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            found += _expanded(module, ast.unparse(field.target), field.annotation)
    return found


def _expanded(module: str, name: str, annotation: ast.expr | None) -> list[str]:
    """A parameter or a field; the fields of its type if that is a dataclass of the package; nothing for `Given`."""
    if not isinstance(annotation, ast.Name):
        return [name]
    home, kind = _place(module, annotation.id)
    if kind == "Given":
        return []
    if home.partition(".")[0] != PACKAGE or kind not in _classes(home):
        return [name]
    decorators = " ".join(map(ast.unparse, _classes(home)[kind].decorator_list))
    return _fields(home, kind) if "dataclass" in decorators else [name]


def _place(module: str, name: str) -> tuple[str, str]:
    """(module, name) of a class by the name that it has in a module."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return node.module, alias.name
    return module, name


def _class(module: str, name: str) -> ast.ClassDef:
    if name not in _classes(module):
        raise NotCertainError(f"there is no class {name} in {module}")
    return _classes(module)[name]


def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef)}


@functools.cache
def _tree(module: str) -> ast.Module:
    """The source of a module; its packages are not imported.

    Raises:
        NotCertainError: there is no source.
    """
    first, *others = module.split(".")
    spec = find_spec(first)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in (Path(folder, *others).with_suffix(".py"), Path(folder, *others, "__init__.py")):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
    raise NotCertainError(f"there is no source of {module}")
