"""The configurations that a command line names: which files they are, and the settings in them.

One reader of YAML serves all verbs: a text may be a stranger's, and small as it is grow without end.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import yaml

from cait import CONFIGS, disk
from cait.errors import UserError, did_you_mean, one_line, printable
from cait.settings import Settings, flatten

MOST_BYTES = 1 << 20
"""Of a configuration."""
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
CLASSES = ("callbacks", "logger", "plugins", "profiler")
"""Settings of the Trainer that name classes."""
WORDS = ("accelerator", "strategy")
"""Those that may be one of Lightning's words too, such as "ddp"."""
OFF: tuple[Any, ...] = (None, False, [], {})
"""Values of a setting that does nothing."""


def files_first(arguments: Iterable[str]) -> list[str]:
    """Every `--config FILE` and `-c FILE` as `--config=FILE`, before the other options, which win over it.

    A group of settings may come from a file of its own, as `--trainer FILE`: those files follow.
    """
    words = iter(arguments)
    files: list[str] = []
    groups: list[str] = []
    others: list[str] = []
    for word in words:
        name, has_value, value = word.partition("=")
        if name in ("--config", "-c"):
            files.append(f"--config={_found(value if has_value else next(words, ''))}")
        elif name in ("--data", "--model", "--trainer"):
            groups.append(word)
            if not has_value:
                groups += islice(words, 1)
        else:
            others.append(word)
    places = (place for place, word in enumerate(others) if word.startswith("-"))
    start = next(places, len(others))
    return [*others[:start], *files, *groups, *others[start:]]


def _found(name: str) -> str:
    """The file that --config names: from the working directory, else of the package. Raises UserError without one."""
    if os.path.exists(name):
        return name
    packaged = os.path.join(CONFIGS, name.removeprefix(f"{CONFIGS.name}/"))
    if os.path.isfile(packaged):
        return packaged
    files = [str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")]
    raise UserError(f"--config {name}: there is no such file{did_you_mean(name, files)}")


def options(arguments: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """The options by name, each with its value as it is typed, `--name=value` or `--name value`; None for a flag."""
    for word, following in pairwise([*arguments, "--"]):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if has_value:
                yield name, value
            else:
                yield name, None if following.startswith("--") else following


def config_files(arguments: Iterable[str]) -> list[Path]:
    """The files that `--config=` names."""
    return [Path(word.removeprefix("--config=")) for word in arguments if word.startswith("--config=")]


def recipe(arguments: Iterable[str]) -> str:
    """The name of the last file of `--config=` that is no overlay; empty if there is none."""
    named = reversed(config_files(arguments))
    return next((path.stem for path in named if not is_overlay(path)), "")


def check_run_name(name: str) -> None:
    """Raise UserError if a run cannot be called that."""
    if not re.fullmatch(r"\w[\w.=+-]*", name):
        raise UserError(f"a run's name is made of letters, digits and . _ - + =, and is not a path: {name!r}")


def is_overlay(path: Path) -> bool:
    """Whether a configuration says where a run trains and logs, and not what it is, as one in a folder `trainer`."""
    groups = {str(name).partition(".")[0] for name in settings(path)}
    return path.parent.name == "trainer" or not {"data", "model"} & groups


def read_text(path: Path) -> str:
    """The text of a configuration. Raises UserError if it is no text."""
    return disk.read_text(path, MOST_BYTES)


def settings(path: Path, text: str | None = None) -> Settings:
    """The settings in a configuration file. Give its `text` if you have read it.

    Raises UserError if it is no YAML, holds no settings, or sets one that follows another.
    """
    content = load(read_text(path) if text is None else text, path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a configuration: it holds no settings, as `model:` and `  lr: 1.0e-3` below it")
    for name in LINKED.keys() & flatten(content).keys():  # the parser would silently ignore it
        raise UserError(f"{path}: {name} cannot be set: {LINKED[name]}")
    return content


def without_absent(config: Settings, known: Collection[str]) -> tuple[Settings, list[str]]:
    """(`config` without the settings of extras that are not here, names of those left out that were set)

    `known` has every setting and group of settings of the verb, as "model" and "model.lr".
    """
    kept = {name: value for name, value in config.items() if name in known}
    for group in {"data", "model"} & kept.keys():
        if isinstance(settings := kept[group], dict):
            # One of the model that is set stays, and is refused: without it the run would be another.
            must_stay = {key for key, value in settings.items() if group == "model" and value}
            stay = must_stay | {key for key in settings if f"{group}.{key}" in known}
            kept[group] = {key: value for key, value in settings.items() if key in stay}
    held = flatten(kept)
    absent = {name: value for name, value in flatten(config).items() if name not in held}
    return kept, [name for name, value in absent.items() if value not in OFF]


def without_classes(config: Settings) -> Settings:
    """`config` without what makes the Trainer build a class, which scoring does not need."""
    trainer = config.get("trainer")
    if not isinstance(trainer, dict):
        return config
    paths = [name for name in WORDS if "." in str(trainer.get(name))]
    kept = {name: trainer[name] for name in trainer.keys() - {*CLASSES, *paths}}
    return config | {"trainer": kept}


class Loader(yaml.CSafeLoader):
    """Builds plain values alone, and refuses a key that is there twice: YAML would keep only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise _refused(f"{twice[0]} is there twice", node)
        return super().construct_mapping(node, deep)


Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)  # the parser too takes dates for text
for kind in (Loader, yaml.SafeDumper):  # the parser takes 1e-3 for a number, so a name like that needs quotes
    number = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
    kind.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))


def load(text: str, source: Path | str) -> Any:
    """The value that a YAML text stands for. `source` names it in errors.

    Raises UserError if it is no YAML, holds what `disk.plain` refuses, or has control characters or aliases, which may
    grow.
    """
    try:
        _check_before_building(text)
        content = yaml.load(text, Loader=Loader)
    except Exception as error:  # a value may have a tag that it does not fit, as `!!int x`
        raise UserError(f"{source} is not YAML: {one_line(error)}") from error
    return disk.plain(content, source)


def _check_before_building(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > disk.DEEPEST:  # before the composer, which calls itself
            raise _refused(f"it has more than {disk.DEEPEST} levels", event)
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"in the place of *{event.anchor} write what it stands for", event)
        if isinstance(event, yaml.ScalarEvent):
            plain = " ".join(event.value.split())
            if printable(plain) != plain:
                raise _refused("a control character", event)


def _refused(problem: str, place: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
