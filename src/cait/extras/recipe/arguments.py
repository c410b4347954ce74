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
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from cait import plugins
from cait.cli.options import asks_for_help
from cait.data.folder import NEEDS_HEIF, FolderSource
from cait.data.listing import HEIF
from cait.data.reading import Reading
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.survey import MINUTES, Survey, left_out, survey, this_machine
from cait.extras.recipe.trial import Trial
from cait.extras.recipe.weights import Weights, check, default_weights, initial_weights, published
from cait.guards import configurations
from cait.guards.configurations import configurations_of, is_overlay, options
from cait.references import is_path
from cait.run.program import Program
from cait.settings import as_text, flatten, group

CHOSEN = "CAIT_RECIPE"
"""Passes the recipe of the first process to the others that Lightning starts."""
TEXTS = ("from", "data.root", "data.train_split", "data.val_split")
"""Settings that stay text where YAML would read a number, as in a folder 2024."""


def replace_folder(arguments: list[str], program: Program) -> list[str]:
    """`arguments` with the recipe chosen for their folder in front; the run is named after the folder.

    `arguments` come back unchanged if they name a checkpoint, a configuration that is not an overlay, or no folder of
    class folders. `--from FILE|timm|RUN|none` is always replaced by the settings of the weights. `--minutes N` says how
    long a chosen run may take.

    Raises UserError if the folder, the weights or the minutes cannot be used.
    """
    given = _settings(arguments)
    minutes, source = _minutes(given), str(given.pop("from", ""))
    arguments = _without(_without(arguments, "minutes"), "from")
    root = given.get("data.root")
    files = [Path(path) for path in configurations_of(arguments)]
    settled = "ckpt_path" in given or not all(map(is_overlay, files))
    if settled or asks_for_help(arguments) or not isinstance(root, str) or not _is_folder(root):
        if minutes:
            raise UserError("--minutes is for a folder of images without a configuration: give --trainer.max_time")
        return [*_as_arguments(initial_weights(source).settings if source not in ("", "none") else {}), *arguments]
    for path in files:
        given = flatten(configurations.settings(path)) | given
    recipe = _chosen(Path(root), given, source, minutes or MINUTES, program)
    if recipe is None:
        return arguments
    program.default_name = re.sub(r"[^\w.=+-]+", "-", Path(root).resolve().name).strip("-.=+") or "own"
    fields = given.get("model.fields")
    if isinstance(fields, dict):  # it would replace the chosen fields instead of joining them
        apart = {f"model.fields.{name}": value for name, value in fields.items()}
        arguments = [*_without(arguments, "model.fields"), *_as_arguments(apart)]
    return [*_as_arguments(recipe), *arguments]


def _is_folder(root: str) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders, and no data set of another kind."""
    if is_path(root) and not Path(root).is_dir():
        return False
    return all(open_other(root, {"root": root}) is None for open_other in plugins.of_kind("open_source"))


def _minutes(given: dict[str, Any]) -> float | None:
    """The minutes that are given, taken out of `given`."""
    minutes = given.pop("minutes", None)
    if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0):
        raise UserError(f"--minutes must be a number above 0, got {minutes!r}")
    return minutes


def _chosen(root: Path, given: dict[str, Any], from_: str, minutes: float, program: Program) -> dict[str, Any] | None:
    """The settings of the recipe, in all processes those of the first, which alone plans, asks the hub and prints.

    None if a value is of the wrong type, which the parser reports.
    """
    is_started = "LOCAL_RANK" in os.environ and CHOSEN in os.environ and not program.processes.several()
    if is_started:  # by Lightning, with the arguments of the first
        return json.loads(os.environ[CHOSEN])

    def planned() -> str:
        try:
            return json.dumps([_planned(root, given, from_, minutes), ""])
        except UserError as error:
            return json.dumps([None, str(error)])
        except (TypeError, ValueError, ArithmeticError):
            return json.dumps([None, ""])

    settings, trouble = json.loads(program.processes.of_first(planned))
    if trouble:
        raise UserError(trouble)
    os.environ[CHOSEN] = json.dumps(settings)
    return settings


def _planned(root: Path, given: dict[str, Any], from_: str, minutes: float) -> dict[str, Any]:
    data = {name.removeprefix("data."): value for name, value in given.items() if name.startswith("data.")}
    data["in_chans"] = flatten(given).get("model.fields.in_chans", 3)
    source = open_source(str(root), **data)
    assert isinstance(source, FolderSource)
    source.prepare()
    machine = this_machine(given)
    weights, reason = _weights(from_, given, len(source.train), minutes, machine.gpus > 0)
    if weights:
        check(weights.settings | given)
    label_sets = getattr(source, "label_sets", None)
    folder = survey(source.train, source.val, source.class_names, group(Reading, data), label_sets)
    recipe = choose(folder, machine, given, Trial(folder), weights, minutes)
    if "baselines" in {setting.name for setting in plugins.settings()}:
        recipe.take("baselines", True)
    recipe.lines[:0] = [("weights", reason)] if reason else []
    with contextlib.redirect_stdout(sys.stderr if "print_config" in given else sys.stdout):
        _report(source, folder, recipe)
    return recipe.settings


def _weights(source: str, given: dict[str, Any], *plan: Any) -> tuple[Weights | None, str]:
    """The weights of the run; if none, the reason."""
    source = source or str(given.get("model.weights") or "")
    if source == "none":
        return None, ""
    if not source:
        return default_weights(given, *plan)
    if source == "timm":
        return published(given, *plan), ""
    return initial_weights(source, str(given.get("model.name", "xxs24"))), ""


@rank_zero_only
def _report(source: FolderSource, folder: Survey, recipe: Recipe) -> None:
    """Print what is in the folder, and the reasons of the recipe."""
    held = " (held out, see validation.csv)" if source.holds_out else ""
    colour = "grey" if folder.grey else "colour"
    images = f"{folder.images:,} to train on, {folder.val:,} to validate on{held}, {len(folder.counts)} classes, "
    lines = [("images", f"{images}{colour}, about {folder.side} pixels")]
    folders = [split for split in source.split_folders() if split]
    if others := left_out(folders, source.class_names):
        listed = ", ".join(f"{number:,} {kind}" for kind, number in list(others.items())[:4])
        lines.append(("left out", listed + (f"; {NEEDS_HEIF}" if others.keys() & {*HEIF} else "")))
    print(f"recipe    chosen for {source.root}, because no --config is given")
    for topic, text in lines + recipe.lines:
        print(textwrap.fill(text, 80, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)


def _settings(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line, by name: --a.b=1, --a.b 1, and flags as True."""
    found: dict[str, Any] = {}
    for name, text in options(arguments):
        found[name] = True if text is None else _value(name, text)
        if isinstance(found[name], dict):
            found |= {f"{name}.{key}": value for key, value in found[name].items()}
    return found


def _value(name: str, text: str) -> Any:
    """A value as the parser will read it. YAML takes #8090a0 for a comment, and 1e-3 for text."""
    if name in TEXTS or text.startswith("#"):
        return text
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return configurations.load(text, f"--{name}")
    except UserError:
        return text


def _without(arguments: list[str], name: str) -> list[str]:
    """`arguments` without a setting, in either spelling."""
    option = f"--{name}"
    pairs = pairwise(["", *arguments])
    return [word for before, word in pairs if option not in (before, word) and not word.startswith(f"{option}=")]


def _as_arguments(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={as_text(value)}" for name, value in settings.items()]
