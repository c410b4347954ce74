"""What jsonargparse refuses on a command line or in a configuration, in one line that names file, key and value."""

from __future__ import annotations

import re
from pathlib import Path

from cait import CONFIGS
from cait.errors import did_you_mean, one_line
from cait.guards.configurations import LINKED, config_files, settings
from cait.settings import flatten


def explain(message: str, arguments: list[str], known: list[str]) -> str:
    """jsonargparse's error, shortened: it has the facts in a text of many lines.

    Args:
        message: what jsonargparse says.
        arguments: verb and options.
        known: every setting, as "model.lr".
    """
    line = one_line(message)
    if found := re.match(r"unrecognized arguments: (-*)([^\s=]*)", line):
        dashes, name = found.groups()
        if not dashes:
            return f"what is {name!r}? Settings are given as --name value, a configuration as --config FILE"
        return f"there is no option --{name}{_hint(name, arguments[0], known)}"
    if found := re.search(r"does not accept option '([\w.]+)'", line):
        name = found[1]
        return f"{_file_with(name, arguments)}there is no setting {name}{_hint(name, arguments[0], known)}"
    if found := re.match(r'(?:Linked "|argument \S+ --> )([\w.]+)', line):
        return f"{found[1]} cannot be set: {LINKED.get(found[1], 'it follows another setting')}"
    if found := re.match(r"Parser key \"config\": .*? '(.*)'", line):
        files = [file.relative_to(CONFIGS) for file in CONFIGS.rglob("*.yaml")]
        name = Path(found[1]).name
        return f"--config {name}: there is no such file{did_you_mean(name, map(str, [*files, *Path().glob('*.yaml')]))}"
    if found := re.match(r'Parser key "(.+?)": (.*)', line):
        return f"{_file_with(found[1], arguments)}--{found[1]} {_shortened(found[2])}"
    return line


def cannot_make(message: str) -> str:
    """jsonargparse's error about a class path whose object cannot be made; empty for any other error."""
    line = one_line(message)
    if found := re.search(r"Problem with given class_path '(.+?)': (.*?)(?: - | Given value|$)", line):
        return f"cannot make {found[1]}: {found[2]}"
    found = re.match(r"Does not validate against .*? Errors: - (.*?) - .* Given value: (.*)", line)
    classes = re.findall(r"class_path'?[=:] ?'(.+?)'", found[2]) if found else []
    return f"cannot make {' or '.join(classes)}: {found[1]}" if found and classes else ""


def _hint(word: str, verb: str, known: list[str]) -> str:
    """The end of a message about an unknown setting: what has its last part, or is alike."""
    leaf = word.rpartition(".")[2].replace("-", "_")
    same = [f"--{name}" for name in known if name.rpartition(".")[2] == leaf and "." in name]
    if same and "." not in word:
        return f"; did you mean {' or '.join(same)}?"
    return did_you_mean(f"--{word}", [f"--{name}" for name in known], f"; `cait {verb} --help=all` lists what there is")


def _file_with(key: str, arguments: list[str]) -> str:
    """ "FILE: " if a configuration sets the key and no option does."""
    if any(re.match(rf"--{re.escape(key)}([.=+]|$)", argument) for argument in arguments):
        return ""
    for file in reversed(config_files(arguments)):
        if any(f"{name}.".startswith(f"{key}.") for name in flatten(settings(file))):
            return f"{file}: "
    return ""


def _shortened(reason: str) -> str:
    """Why a setting cannot have its value: what it takes instead of it."""
    if made := cannot_make(reason):
        return f"fails: {made}"
    value = re.search(r"(?:Got|Given) value: ?(.*)$", reason)
    types = re.search(r"Subtypes: \[(.*)\] Errors: |Expected an? (.*?)\. Got value", reason)
    if not (value and types):
        return f"cannot be used: {reason}"
    taken = re.sub(r"<class '([\w.]+)'>", r"\1", types[1] or types[2])
    taken = taken.replace("typing.", "").replace("NoneType", "null")
    return f"cannot be {value[1]!r}: it takes {taken}"
