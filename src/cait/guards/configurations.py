"""The configurations that a command line names: which files they are, and the settings in them.

One reader of YAML serves all verbs. It has limits, because a small file of somebody else may stand for much.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cait import CONFIGS, disk
from cait.errors import UserError, did_you_mean, one_line, printable
from cait.plain import DEEPEST, plain
from cait.settings import Settings, flatten, is_in, listed

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
    "config": "give each file as --config",
}
"""Settings that follow another, and what to do instead."""
CLASSES = ("callbacks", "logger", "plugins", "profiler")
"""Settings of the Trainer that name classes."""
WORDS = ("accelerator", "strategy")
"""Those that may be one of Lightning's words too, such as "ddp"."""
GROUPS = ("data", "model", "trainer")
"""Groups of settings that may come from a file of their own, as `--trainer FILE`."""
Layer = tuple[Path | None, Settings]
"""Settings, and the file that they are from, if any."""
OFF: tuple[Any, ...] = (None, False, [], {})
"""Values of a setting that does nothing."""


def find_config(name: str) -> Path:
    """The file that --config names: from the working directory, else of the package. Raises UserError without one."""
    in_package = CONFIGS / name.removeprefix(f"{CONFIGS.name}/")
    for path in (Path(name), in_package):
        if path.exists():
            return path
    known = [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")]
    raise UserError(f"--config {name}: there is no such file{did_you_mean(name, known)}")


def load_group(text: str) -> Any:
    """The settings of a group, as --trainer gives them: in a file of their own, or as YAML."""
    return load(read_text(Path(text)) if os.path.isfile(text) else text, text)


def typed(words: Iterable[str]) -> set[str]:
    """The names of the options among the words of a command line."""
    return without_plus(word[2:].partition("=")[0] for word in words if word.startswith("--"))


def without_plus(names: Iterable[str]) -> set[str]:
    """The settings that are named: `trainer.callbacks+` appends to `trainer.callbacks`."""
    return {name.replace("+", "") for name in names}


def entries(value: Any) -> Counter[str]:
    """What a list of names or classes, or a dictionary has in it, as the parser gives it."""
    if isinstance(value, dict):
        return Counter(value.keys())
    names = [getattr(item, "class_path", item) for item in listed(value)]
    return Counter(name for name in names if isinstance(name, str))


@dataclass(frozen=True)
class Sources:
    """Where settings come from. One that no source names has its default."""

    names: list[set[str]]
    """The names that each layer gives, and last those that are typed."""

    def last(self, settings: Collection[str]) -> int:
        """The number of the last source that gives one of these settings, a part or the whole of it; -1 for none."""
        last = -1
        for number, names in enumerate(self.names):
            if any(is_in(name, settings) for name in names) or any(
                is_in(name, names) for name in settings
            ):
                last = number
        return last

    def given(self, config: Settings) -> Settings:
        """Those of all settings that a source gives, by name, as {"model.fields.depth": 36}."""
        names = set().union(*self.names)
        return {name: value for name, value in flatten(config).items() if is_in(name, names)}


def recipe(layers: Iterable[Layer]) -> str:
    """The name of the last file that is no overlay; empty if there is none."""
    names = [path.stem for path, content in layers if path and not is_overlay(path, content)]
    return names[-1] if names else ""


def check_run_name(name: str) -> None:
    """Raise UserError if a run cannot be called that."""
    if not re.fullmatch(r"\w[\w.=+-]*", name):
        raise UserError(
            f"a run's name has letters, digits and _, then also . - + =, and is not a path: {name!r}"
        )


def is_overlay(path: Path, content: Settings) -> bool:
    """Whether a file says where a run trains and logs, and not what it is, as one in a folder `trainer`."""
    groups = {str(name).partition(".")[0] for name in content}
    return path.parent.name == "trainer" or groups.isdisjoint(("data", "model"))


def read_text(path: Path) -> str:
    """The text of a configuration. Raises UserError if it is no text."""
    return disk.read_text(path, MOST_BYTES)


def settings(path: Path, text: str | None = None) -> Settings:
    """The settings in a configuration file, without its empty groups. Give its `text` if you have read it.

    Raises UserError if it is no YAML, holds no settings, or sets one that follows another.
    """
    content = load(read_text(path) if text is None else text, path)
    if not isinstance(content, dict):
        raise UserError(
            f"{path} is not a configuration: it holds no settings, as `model:` and `  lr: 1.0e-3` below it"
        )
    linked = LINKED.keys() & flatten(content)
    if linked:  # the parser would silently ignore them
        name = min(linked)
        raise UserError(f"{path}: {name} cannot be set: {LINKED[name]}")
    return {
        name: value
        for name, value in content.items()
        if value is not None or name not in (*GROUPS, "ema")
    }


def without_absent(config: Settings, known: Collection[str]) -> tuple[Settings, list[str]]:
    """(`config` without the settings of extras that are not here, names of those left out that were set)

    `known` has every setting and group of settings of the verb, as "model" and "model.lr".
    """
    kept = {name: value for name, value in config.items() if name in known}
    for group in ("data", "model"):
        if isinstance(kept.get(group), dict):
            # One of the model that is set stays, and is refused: without it the run would be another.
            kept[group] = {
                key: value
                for key, value in kept[group].items()
                if f"{group}.{key}".rstrip("+") in known or (group == "model" and value)
            }
    remaining = flatten(kept)
    left_out = [
        name
        for name, value in flatten(config).items()
        if name not in remaining and value not in OFF
    ]
    return kept, left_out


def without_classes(config: Settings) -> Settings:
    """`config` without what makes the Trainer build a class, which scoring does not need."""
    trainer = config.get("trainer")
    if not isinstance(trainer, dict):
        return config
    values = {name: value for name, value in trainer.items() if name.rstrip("+") not in CLASSES}
    for name in WORDS:
        if "." in str(values.get(name)):
            del values[name]
    return config | {"trainer": values}


class Loader(yaml.CSafeLoader):
    """Builds plain values alone, and refuses a key that is there twice: YAML would keep only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # one value would be lost beside its `key+` too
        names = Counter(
            key.value.removesuffix("+") for key, _ in node.value if isinstance(key, yaml.ScalarNode)
        )
        for name, times in names.most_common(1):
            if times > 1:
                raise _refused(f"{name} is there twice", node)
        return super().construct_mapping(node, deep)


# the parser too takes dates for text
Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
NUMBER = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$")
"""The parser takes 1e-3 for a number, so a name like that needs quotes."""
for yaml_class in (Loader, yaml.SafeDumper):
    yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789"))


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
    return plain(content, source)


def _check_before_building(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            raise _refused(f"in the place of *{event.anchor} write what it stands for", event)
        elif isinstance(event, yaml.ScalarEvent):
            words = " ".join(event.value.split())
            if printable(words) != words:
                raise _refused("a control character", event)
        if depth > DEEPEST:  # before the composer, which calls itself
            raise _refused(f"it has more than {DEEPEST} levels", event)


def _refused(problem: str, where: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)
