"""What jsonargparse refuses on a command line or in a configuration, in one line that names file, key and value."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from cait import CONFIGS
from cait.errors import did_you_mean, one_line
from cait.guards.configurations import LINKED, config_files, settings
from cait.references import is_path
from cait.settings import flatten

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list, as [a,b]",
    "tuple": "a list, as [a,b]",
    "collections.abc.Sequence": "a list, as [a,b]",
    "collections.abc.Iterable": "a list, as [a,b]",
    "dict": "named values, as {name: 1}",
    "NoneType": "null",
}
"""Python's types in words."""
ALIASES = {"epochs": "trainer.max_epochs", "steps": "trainer.max_steps", "gpus": "trainer.devices"}
"""What people type, and the setting that they mean."""

_TYPE = re.compile(r"<class '([\w.]+)'>|typing\.Literal\[(.*?)\]|([\w.]+)\[[^\[\]]*\]")


def explain(message: str, arguments: list[str], known: list[str]) -> str:
    """jsonargparse's error in the words of a user. It has all of its facts in one text, which is taken apart here.

    Args:
        message: what jsonargparse says.
        arguments: verb and options.
        known: every setting, as "model.lr".
    """
    line, hint = one_line(message), partial(_did_you_mean, verb=arguments[0], known=known)
    if found := re.match(r"unrecognized arguments: ([^-]\S*)", line):
        if Path(found[1]).suffix in (".yaml", ".yml"):
            return f"what is {found[1]!r}? A configuration comes after --config: --config {found[1]}"
        return f"what is {found[1]!r}? Settings are given as --name value; `cait {arguments[0]} --help` lists them"
    if found := re.match(r"unrecognized arguments: (-*([^\s=]*))", line):
        return f"there is no option {found[1]}{hint(found[2])}"
    if found := re.search(r"does not accept option '([\w.]+)'", line):
        return f"{_file_with(found[1], arguments)}there is no setting {found[1]}{hint(found[1])}"
    if found := re.match(r"argument (?:-\w/)?(--\S+): expected one argument", line):
        return f"{found[1]} needs a value"
    if line == "Unexpected config:":
        return "--config needs a file"
    if (found := re.match(r'Parser key "(.+?)": ', line)) and re.search(r"(Got|Given) value: ?$", line):
        return f"{_file_with(found[1], arguments)}--{found[1]} needs a value, not an empty one"
    if found := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', line):
        instead = LINKED.get(found[1], "it follows another setting")
        return f"{_file_with(found[1], arguments)}{found[1]} cannot be set: {instead}"
    if found := re.match(r'Parser key "config": .*?(exist|not a file|readable).*?: \'(.*?)\'', line):
        return _no_config(Path(found[2]))
    if found := re.match(r"Parser key \"(.+?)\": Unable to load config '(.*?)'", line):
        member = next((name for name in known if name.startswith(f"{found[1]}.")), f"{found[1]}.name")
        return f"--{found[1]} cannot be {found[2]!r}: it is a group of settings, as --{member} VALUE"
    if found := re.match(r'Parser key "(.+?)": (.*)', line):
        return _file_with(found[1], arguments) + _wrong_value(found[1], found[2])
    return line


def cannot_make(message: str) -> str:
    """jsonargparse's error about a class path whose object cannot be made; empty for any other error."""
    found = re.search(r"Problem with given class_path '(.+?)': (.*?)(?: - Expected| Given value|$)", one_line(message))
    return f"cannot make {found[1]}: {found[2]}" if found else ""


def _did_you_mean(word: str, verb: str, known: list[str]) -> str:
    """The end of a message about an unknown setting: by its whole name, or by its last part."""
    leaf = word.rpartition(".")[2].replace("-", "_")
    same = [name for name in known if name.rpartition(".")[2] == leaf and "." in name]
    near = [ALIASES[leaf]] if leaf in ALIASES else same if 0 < len(same) <= 3 and "." not in word else []
    if near:
        return f"; did you mean {' or '.join(f'--{name}' for name in near)}?"
    return did_you_mean(f"--{word}", [f"--{name}" for name in known], f"; `cait {verb} --help=all` lists what there is")


def _no_config(path: Path) -> str:
    name = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    if path.is_dir():
        return f"--config {name} is a folder; name a YAML file in it"
    if path.exists():
        return f"--config {name} cannot be read"
    roots = Path(), CONFIGS.parent
    files = [file.relative_to(root) for root in roots for file in (root / CONFIGS.name).rglob("*.yaml")]
    return f"--config {name}: there is no such file{did_you_mean(name, map(str, [*files, *Path().glob('*.yaml')]))}"


def _file_with(key: str, arguments: list[str]) -> str:
    """ "FILE: " if a configuration sets the key and no option does."""
    if any(re.match(rf"--{re.escape(key)}([.=+]|$)", argument) for argument in arguments):
        return ""
    for file in reversed(config_files(arguments)):
        if any(f"{name}.".startswith(f"{key}.") for name in flatten(settings(file))):
            return f"{file}: "
    return ""


def _wrong_value(key: str, reason: str) -> str:
    """What a setting cannot be, and what it takes."""
    if found := re.match(r"Expected a tuple with (\d+) elements\. Got value: (.*)", reason):
        return f"--{key} cannot be {found[2]}: it takes a list of {found[1]}"
    if found := re.match(r"Expected a (.+?)\. Got value: (.*)", reason):
        return f"--{key} cannot be {found[2]!r}: it takes {_in_words(found[1])}"
    union = re.match(r".*?Union subtypes Subtypes: \[(.*?)\] Errors: - (.*) Given value type: .*? value: (.*)", reason)
    if not union:
        return f"--{key}: {reason}"
    types, errors, value = union.groups()
    if key == "seed_everything":
        return f"--{key} cannot be {value!r}: it takes a whole number"
    if found := re.match(r"NestedArg\(key='(.+?)'", value):
        return f"--{key}.{found[1]} has no class to set it of: name one first, --{key} CLASS"
    if found := re.search(r"Problem with given class_path '(.+?)': (.*?)(?: - |$)", errors):
        return f"--{key}: cannot use {found[1]}: {_wrong_arguments(found[2])}"
    if key.startswith("trainer.") and is_path(value):
        return f"--{key} cannot be {value!r}: write a class with a dot, {value.replace(':', '.')}"
    if found := re.search(r"does not correspond to a subclass of (\w+)", errors):
        return f"--{key} cannot be {value!r}: it is no {found[1]}, or needs a package that is not installed"
    if "Expected a dot import path string" in errors:
        value = value.strip("[]'")
        return f"--{key} cannot be {value!r}: there is no such class{did_you_mean(value, _class_names(key))}"
    return f"--{key} cannot be {value!r}: it takes {_in_words(types)}"


def _class_names(key: str) -> list[str]:
    """The classes that Lightning knows by name for a setting."""
    from lightning.pytorch import callbacks, loggers

    known: Any = {"trainer.callbacks": callbacks, "trainer.logger": loggers}.get(key)
    return list(known.__all__) if known else []


def _wrong_arguments(reason: str) -> str:
    """Why a class refuses its settings."""
    if found := re.match(r"the following arguments are required: (.*)", reason):
        return f"it needs {found[1]}, under init_args"
    if found := re.match(r'Parser key "(.+?)": (.*)', reason):
        return _wrong_value(found[1], found[2])
    return reason


def _in_words(types: str) -> str:
    """ "<class 'int'>, <class 'NoneType'>" as "a whole number or null"."""
    words: dict[str, None] = {}  # each once, in order
    for name, choices, generic in _TYPE.findall(types):
        kind = name or generic
        described = TYPES.get(kind, f"a {kind.rpartition('.')[2]}")
        words |= dict.fromkeys([choice.strip("' ") for choice in choices.split(",")] if choices else [described])
    *others, last = words or [types]
    return " or ".join([", ".join(others), last] if others else [last])
