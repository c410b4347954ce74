"""What is wrong with a command line or a configuration, in one line that names file, key and value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cait import plugins
from cait.errors import UserError, did_you_mean, one_line
from cait.references import is_path

KINDS = {
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
LINKED = {
    "model.img_size": "give --data.img_size",
    "model.mean": "give --data.mean",
    "model.std": "give --data.std",
    "model.num_classes": "it is the number of the data's classes",
    "data.seed": "give --seed_everything",
}
"""Settings that follow another, and what to do instead."""
ALIASES = {"epochs": "trainer.max_epochs", "steps": "trainer.max_steps", "gpus": "trainer.devices"}
"""What people type, and the setting that they mean."""

_TYPE = re.compile(r"<class '([\w.]+)'>|typing\.Literal\[(.*?)\]|([\w.]+)\[[^\[\]]*\]")
_NEGATIVE = re.compile(r"-\.?\d[\d_]*\.?\d*(e[+-]?\d+)?", re.IGNORECASE)


def join_negative(arguments: Iterable[str]) -> list[str]:
    """`--model.lr -1e-3` as `--model.lr=-1e-3`: argparse takes the number for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and _NEGATIVE.fullmatch(argument) and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def configurations_of(arguments: list[str]) -> list[str]:
    """What `--config` names: files, or YAML itself."""
    named = []
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        if option in ("--config", "-c"):
            named.append(value if equals else following)
    return named


def places_of_configs(arguments: list[str]) -> list[tuple[int, Path]]:
    """The files that `--config` names, each with the place of its argument."""
    found = []
    for place, (option, argument) in enumerate(pairwise(["", *arguments])):
        text = argument.removeprefix("--config=") if argument.startswith("--config=") else argument
        if (text != argument or option in ("-c", "--config")) and len(Path(text).name) < 256 and Path(text).is_file():
            found.append((place, Path(text)))
    return found


def config_files(arguments: list[str]) -> list[Path]:
    """The files that `--config` names."""
    return [path for _, path in places_of_configs(arguments)]


def is_overlay(path: Path) -> bool:
    """Whether a configuration says where a run trains and logs, and not what it is.

    It then lies in a folder `trainer`, or sets what an extra adds and, at most, the Trainer.
    """
    if path.parent.name == "trainer":
        return True
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except (OSError, ValueError, yaml.YAMLError):  # no file or no YAML, which the parser reports
        return False
    added = {setting.name for settings in plugins.of_kind("SETTINGS") for setting in settings}
    return isinstance(content, dict) and bool(content.keys() & added) and content.keys() <= added | {"trainer"}


def check_config(path: Path) -> None:
    """Refuse a file that is not YAML, holds no settings, has a key twice or sets one that follows another.

    Raises:
        UserError: it names the file and, in YAML, the line.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a configuration: it holds bytes that are no text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        tab = "; indent with spaces, not with tabs" if "\t" in _line(path, mark) else ""
        raise UserError(f"{path} is not YAML{place}: {error.problem or error.context}{tab}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {one_line(error)}") from error
    if root is None:
        raise UserError(f"{path} is not a configuration: it is empty")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} is not a configuration: it holds no settings, as `model:` and `  lr: 1.0e-3` below it")
    for name, line in _repeated(root):
        raise UserError(f"{path} has {name} twice, at line {line} again; YAML would keep only the last")
    for group, part in ((key.value, value) for key, value in root.value if isinstance(value, yaml.MappingNode)):
        for name in (f"{group}.{key.value}" for key, _ in part.value):
            if name in LINKED:  # the parser would silently ignore it
                raise UserError(f"{path}: {name} cannot be set: {LINKED[name]}")


def _line(path: Path, mark: Any) -> str:
    lines = path.read_text().splitlines()
    return lines[mark.line] if mark and mark.line < len(lines) else ""


def _repeated(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Keys that a mapping repeats, with the lines where it does."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item, prefix)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = prefix + str(key.value)
            if isinstance(key, yaml.ScalarNode) and name in seen and key.tag != "tag:yaml.org,2002:merge":
                yield name, key.start_mark.line + 1
            seen.add(name)
            yield from _repeated(value, f"{name}.")


def explain(message: str, arguments: list[str], known: list[str]) -> str:
    """jsonargparse's error in the words of a user.

    Args:
        message: what jsonargparse says.
        arguments: verb and options.
        known: every setting, as "model.lr".
    """
    line, verb = one_line(message), arguments[0]
    if found := re.match(r"unrecognized arguments: (\S+)", line):
        return _unrecognized(found[1], verb, known)
    if found := re.search(r"does not accept option '([\w.]+)'", line):
        return f"{_where(found[1], arguments)}there is no setting {found[1]}{_near(found[1], verb, known)}"
    if found := re.match(r"argument (?:-\w/)?(--\S+): expected one argument", line):
        return f"{found[1]} needs a value"
    if found := re.match(r'Linked "(.+?)" must be given via', line):
        instead = LINKED.get(found[1], "it follows another setting")
        return f"{_where(found[1], arguments)}{found[1]} cannot be set: {instead}"
    if found := re.match(r'Parser key "config": .*?(exist|not a file|readable).*?: \'(.*?)\'', line):
        return _no_config(Path(found[2]))
    if found := re.match(r"Parser key \"(.+?)\": Unable to load config '(.*?)'", line):
        member = _member(found[1], known)
        return f"--{found[1]} cannot be {found[2]!r}: it is a group of settings, as --{found[1]}.{member}"
    if found := re.match(r'Parser key "(.+?)": (.*)', line):
        return _where(found[1], arguments) + _value(found[1], found[2])
    return line


def not_made(message: str) -> str:
    """jsonargparse's error about a class path whose object cannot be made; empty for any other error."""
    found = re.search(r"Problem with given class_path '(.+?)': (.*?)(?: - Expected| Given value|$)", one_line(message))
    return f"cannot make {found[1]}: {found[2]}" if found else ""


def _unrecognized(argument: str, verb: str, known: list[str]) -> str:
    if not argument.startswith("-"):
        if Path(argument).suffix in (".yaml", ".yml"):
            return f"what is {argument!r}? A configuration comes after --config: --config {argument}"
        return f"what is {argument!r}? Settings are given as --name value; `cait {verb} --help` lists them"
    option = argument.split("=")[0]
    return f"there is no option {option}{_near(option.lstrip('-'), verb, known)}"


def _near(word: str, verb: str, known: list[str]) -> str:
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
    there = [str(file) for file in Path("configs").rglob("*.yaml")] + [str(file) for file in Path().glob("*.yaml")]
    return f"--config {name}: there is no such file{did_you_mean(name, there)}"


def _member(group: str, known: list[str]) -> str:
    return next((name.removeprefix(f"{group}.") for name in known if name.startswith(f"{group}.")), "name") + " VALUE"


def _where(key: str, arguments: list[str]) -> str:
    """ "FILE: " if a configuration sets the key and no option does."""
    if any(re.match(rf"--{re.escape(key)}[.=+]|--{re.escape(key)}$", argument) for argument in arguments):
        return ""
    for file in reversed(config_files(arguments)):
        if key in _names(yaml.safe_load(file.read_text())):
            return f"{file}: "
    return ""


def _names(nested: Any, prefix: str = "") -> Iterator[str]:
    """The settings of a configuration, and their groups."""
    for key, value in nested.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")


def _value(key: str, reason: str) -> str:
    """What a setting cannot be, and what it takes."""
    union = re.match(
        r".*?Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] "
        r"Errors: - (.*) Given value type: .*? Given value: (.*)",
        reason,
    )
    if not union:
        if found := re.match(r"Expected a (tuple with \d+) elements\. Got value: (.*)", reason):
            return f"--{key} cannot be {found[2]}: it takes a list of {found[1].split()[-1]}"
        if found := re.match(r"Expected a (.+?)\. Got value: (.*)", reason):
            return f"--{key} cannot be {found[2]!r}: it takes {_words(found[1])}"
        return f"--{key}: {reason}"
    types, errors, value = union.groups()
    if key == "seed_everything":
        return f"--{key} cannot be {value!r}: it takes a whole number"
    if part := re.match(r"NestedArg\(key='(.+?)'", value):
        return f"--{key}.{part[1]} has no class to set it of: name one first, --{key} CLASS"
    if problem := re.search(r"Problem with given class_path '(.+?)': (.*?)(?: - |$)", errors):
        return f"--{key}: cannot use {problem[1]}: {_of_class(problem[2])}"
    if key.startswith("trainer.") and is_path(value):
        return f"--{key} cannot be {value!r}: write a class with a dot, {value.replace(':', '.')}"
    if found := re.search(r"does not correspond to a subclass of (\w+)", errors):
        return f"--{key} cannot be {value!r}: it is no {found[1]}, or needs a package that is not installed"
    if "Expected a dot import path string" in errors:
        value = value.strip("[]'")
        return f"--{key} cannot be {value!r}: there is no such class{did_you_mean(value, _classes(key))}"
    return f"--{key} cannot be {value!r}: it takes {_words(types)}"


def _classes(key: str) -> list[str]:
    """The classes that Lightning knows by name for a setting."""
    from lightning.pytorch import callbacks, loggers

    known: Any = {"trainer.callbacks": callbacks, "trainer.logger": loggers}.get(key)
    return list(known.__all__) if known else []


def _of_class(reason: str) -> str:
    """Why a class refuses its settings."""
    if found := re.match(r"the following arguments are required: (.*)", reason):
        return f"it needs {found[1]}, under init_args"
    if found := re.match(r'Parser key "(.+?)": (.*)', reason):
        return _value(found[1], found[2])
    return reason


def _words(types: str) -> str:
    """ "<class 'int'>, <class 'NoneType'>" as "a whole number or null"."""
    words: list[str] = []
    for name, choices, generic in _TYPE.findall(types):
        words += [choice.strip("' ") for choice in choices.split(",")] if choices else [_word(name or generic)]
    words = list(dict.fromkeys(words))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or types


def _word(name: str) -> str:
    return KINDS.get(name, f"a {name.rpartition('.')[2]}")
