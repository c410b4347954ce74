"""`cait fit --data.root DIR` without a configuration: put the settings of a chosen recipe in front of those given."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cait import plugins
from cait.cli.options import asks_for_help
from cait.errors import UserError
from cait.guards.configurations import check_config, configurations_of, is_overlay
from cait.run.program import Program
from cait.settings import flatten, group

if TYPE_CHECKING:
    from cait.extras.recipe.survey import Survey
    from cait.extras.recipe.weights import Weights

SOURCE = ("train_split", "val_split", "val_fraction", "val_list")
"""Settings that select images of the folder."""
FROM = "from"
TEXTS = (FROM, "data.root", "data.train_split", "data.val_split")
"""Settings that stay text where YAML would read a number, as in a folder 2024."""
COLOUR = "data.background"
"""For YAML "#8090a0" is a comment."""
WIDTH = 80


def replace_folder(arguments: list[str], program: Program) -> list[str]:
    """`arguments` with the recipe chosen for their folder in front; the run is named after the folder.

    `arguments` come back unchanged if they name a checkpoint, a configuration that is not an overlay, or no folder of
    class folders. `--from FILE|timm|RUN` is always replaced by the settings of the weights.

    Raises:
        UserError: the folder or the weights cannot be used.
    """
    given = _settings(arguments)
    weights = None
    if FROM in given:
        from cait.extras.recipe.weights import initial_weights

        weights = initial_weights(str(given.pop(FROM)))
        arguments = _without(arguments, FROM)
    root = given.get("data.root")
    configurations = [Path(path) for path in configurations_of(arguments)]
    settled = "ckpt_path" in given or not all(map(is_overlay, configurations))
    if settled or asks_for_help(arguments) or not isinstance(root, str) or not _is_folder(root):
        return [*(_as_arguments(weights.settings) if weights else []), *arguments]
    for path in configurations:
        check_config(path)
        given = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))) | given
    try:
        recipe = _chosen(Path(root), given, weights, program)
    except UserError:
        raise
    except (TypeError, ValueError):  # a value of the wrong type; the parser reports it
        return arguments
    program.default_name = re.sub(r"[^\w.=+-]+", "-", Path(root).resolve().name).strip("-.=+") or "own"
    fields = given.get("model.fields")
    if isinstance(fields, dict):  # it would replace the chosen fields instead of joining them
        apart = {f"model.fields.{name}": value for name, value in fields.items()}
        arguments = [*_without(arguments, "model.fields"), *_as_arguments(apart)]
    return [*_as_arguments(recipe), *arguments]


def _is_folder(root: str) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders, and no data set of another kind."""
    from cait.references import is_path

    others = plugins.of_kind("open_source")
    return not is_path(root) and all(opened(root, {"root": root}) is None for opened in others)


def _chosen(root: Path, given: dict[str, Any], weights: Weights | None, program: Program) -> dict[str, Any]:
    """The settings of the recipe, the same in all processes of the run; the first one prints the reasons."""
    from cait.data.folder import split_folders
    from cait.data.reading import Reading
    from cait.data.source import FolderSource, open_source
    from cait.extras.recipe.duration import this_machine
    from cait.extras.recipe.rules import choose
    from cait.extras.recipe.survey import left_out, survey

    settings = {key: given[f"data.{key}"] for key in SOURCE if f"data.{key}" in given}
    source = open_source(str(root), **settings)
    assert isinstance(source, FolderSource)
    source.prepare()
    reading = group(Reading, {name.removeprefix("data."): value for name, value in given.items()})
    folder = survey(source.train, source.val, source.class_names, reading)
    recipe = choose(folder, this_machine(given), given, weights)
    if {os.environ.get(rank, "0") for rank in ("LOCAL_RANK", "SLURM_PROCID")} == {"0"}:
        train, val = split_folders(root, settings.get("train_split", "train"), settings.get("val_split", "val"))
        others = left_out([train, *([val] if val else [])], source.class_names)
        with contextlib.redirect_stdout(sys.stderr if "print_config" in given else sys.stdout):
            _print(root, [*_counts(folder, others, held_out=val is None), *recipe.lines])
    words = program.processes.agree(json.dumps(recipe.settings))  # shares of the cores may differ
    return json.loads(words[0])


def _counts(folder: Survey, others: Mapping[str, int], held_out: bool) -> list[tuple[str, str]]:
    """The lines about the images, and about files that were left out, by suffix."""
    from cait.data.folder import NEEDS_HEIF
    from cait.data.listing import HEIF

    held = " (held out, see validation.csv)" if held_out else ""
    colour = "grey" if folder.grey else "colour"
    images = (
        f"{folder.images:,} to train on, {folder.val:,} to validate on{held}, {len(folder.counts)} classes, {colour}, "
        f"about {folder.side} pixels"
    )
    if not others:
        return [("images", images)]
    listed = ", ".join(f"{number:,} {kind}" for kind, number in list(others.items())[:4])
    return [("images", images), ("left out", listed + (f"; {NEEDS_HEIF}" if others.keys() & {*HEIF} else ""))]


def _print(root: Path, lines: list[tuple[str, str]]) -> None:
    print(f"recipe    chosen for {root}, because no --config is given")
    for topic, text in lines:
        print(textwrap.fill(text, WIDTH, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)


def _settings(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line, by name: --a.b=1, --a.b 1, and flags as True."""
    found: dict[str, Any] = {}
    for argument, following in pairwise([*arguments, "--"]):
        if not argument.startswith("--"):
            continue
        name, equals, text = argument[2:].partition("=")
        if not equals and following.startswith("--"):
            found[name] = True
        else:
            text = text if equals else following
            found[name] = text if name in TEXTS or (name == COLOUR and text not in ("null", "~")) else _value(text)
        if isinstance(found[name], dict):
            found |= {f"{name}.{key}": value for key, value in found[name].items()}
    return found


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):  # YAML takes 1e-3 for text
        return float(value)
    return value


def _without(arguments: list[str], name: str) -> list[str]:
    """`arguments` without a setting, in either spelling."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == f"--{name}":
            skip = True
        elif not argument.startswith(f"--{name}="):
            kept.append(argument)
    return kept


def _as_arguments(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={_text(value)}" for name, value in settings.items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
