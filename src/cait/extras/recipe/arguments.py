"""`cait fit --data.root DIR` without a configuration: add the settings of a chosen recipe to those given."""

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
from cait.data.folder import NEEDS_HEIF, FolderSource, abbreviate
from cait.data.listing import HEIF
from cait.data.reading import Reading
from cait.data.source import open_source
from cait.errors import UserError
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.survey import MINUTES, Survey, survey, this_machine
from cait.extras.recipe.trial import Trial, channels_of
from cait.extras.recipe.weights import Weights, default_weights, initial_weights, published
from cait.guards import configurations
from cait.guards.configurations import configurations_of, is_overlay, options
from cait.references import is_path
from cait.run.program import Program
from cait.settings import as_text, flatten, group

CHOSEN = "CAIT_RECIPE"
"""Passes the recipe of the first process to the others that Lightning starts."""
TEXTS = ("from", "data.root", "data.train_split", "data.val_split")
"""Settings that stay text where YAML would read a number, as in a folder 2024."""


def add_recipe(arguments: list[str], program: Program) -> list[str]:
    """`arguments` and the recipe chosen for their folder; the run is named after the folder.

    `arguments` come back unchanged if they name a checkpoint, a configuration that is not an overlay, or no folder of
    class folders. `--from FILE|timm|RUN|none` is always replaced by the settings of the weights. `--minutes N` says how
    long a chosen run may take.

    Raises UserError if the folder, the weights or the minutes cannot be used.
    """
    given = given_settings(arguments)
    minutes, source = given.pop("minutes", None), str(given.pop("from", ""))
    arguments = without(without(arguments, "minutes"), "from")
    root = given.get("data.root")
    files = [Path(path) for path in configurations_of(arguments)]
    settled = "ckpt_path" in given or not all(map(is_overlay, files))
    if settled or asks_for_help(arguments) or not isinstance(root, str) or not is_folder(root):
        if minutes:
            raise UserError("--minutes is for a folder of images without a configuration: give --trainer.max_time")
        return [*as_arguments(initial_weights(source).settings if source not in ("", "none") else {}), *arguments]
    if minutes is not None and (not isinstance(minutes, int | float) or minutes <= 0):
        raise UserError(f"--minutes must be a number above 0, got {minutes!r}")
    for path in files:
        given = flatten(configurations.settings(path)) | given
    if (recipe := chosen(Path(root), given, source, minutes or MINUTES, program)) is None:
        return arguments
    program.default_name = re.sub(r"[^\w.=+-]+", "-", Path(root).resolve().name).strip("-.=+") or "own"
    return [*arguments, *as_arguments(recipe)]  # after them, because a dictionary of fields would replace those chosen


def is_folder(root: str) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders, and no data set of another kind."""
    if is_path(root) and not Path(root).is_dir():
        return False
    return all(open_other(root, {"root": root}) is None for open_other in plugins.of_kind("open_source"))


def chosen(root: Path, given: dict[str, Any], source: str, minutes: float, program: Program) -> dict[str, Any] | None:
    """The settings of the recipe, in all processes those of the first, which alone plans, asks the hub and prints.

    None if a value is of the wrong type, which the parser reports.
    """

    def planned() -> str:
        try:
            return json.dumps([plan(root, given, source, minutes), ""])
        except UserError as error:
            return json.dumps([None, str(error)])
        except (TypeError, ValueError, ArithmeticError):
            return json.dumps([None, ""])

    is_from_lightning = "LOCAL_RANK" in os.environ and CHOSEN in os.environ and not program.processes.several()
    if not is_from_lightning:  # which started this process with the arguments of the first
        os.environ[CHOSEN] = program.processes.of_first(planned)
    settings, trouble = json.loads(os.environ[CHOSEN])
    if trouble:
        raise UserError(trouble)
    return settings


def plan(root: Path, given: dict[str, Any], from_: str, minutes: float) -> dict[str, Any]:
    """Look at the folder, choose the settings of its recipe, and print why."""
    data = {name.removeprefix("data."): value for name, value in given.items() if name.startswith("data.")}
    data["in_chans"] = channels_of(given)
    source = open_source(str(root), **data)
    assert isinstance(source, FolderSource)
    source.prepare()
    machine = this_machine(given)
    weights, reason = weights_of(from_ or str(given.get("model.weights") or ""), given, machine.gpus > 0)
    label_sets = getattr(source, "label_sets", None)
    folder = survey(source.train, source.val, source.class_names, group(Reading, data), label_sets)
    recipe = choose(folder, machine, given, Trial(), weights, minutes)
    if "pretrained" in plugins.extras():
        recipe.take("baselines", True)
    recipe.lines[:0] = [("weights", reason)] if reason else []
    with contextlib.redirect_stdout(sys.stderr if "print_config" in given else sys.stdout):
        report(source, folder, recipe)
    return recipe.settings


def weights_of(source: str, given: dict[str, Any], has_gpu: bool) -> tuple[Weights | None, str]:
    """The weights of the run; if none, the reason."""
    if source == "none":
        return None, ""
    if not source:
        return default_weights(given, has_gpu)
    if source == "timm":
        return published(given, has_gpu), ""
    return initial_weights(source, str(given.get("model.name", "xxs24"))), ""


@rank_zero_only
def report(source: FolderSource, folder: Survey, recipe: Recipe) -> None:
    """Print what is in the folder, and the reasons of the recipe."""
    held = " (held out, see validation.csv)" if source.holds_out else ""
    colour = "grey" if folder.grey else "colour"
    images = f"{folder.images:,} to train on, {folder.val:,} to validate on{held}, {len(folder.counts)} classes, "
    lines = [("images", f"{images}{colour}, about {folder.side} pixels")]
    for why, paths in source.left_out.items():
        lacks = f"; {NEEDS_HEIF}" if any(path.lower().endswith(HEIF) for path in paths) else ""
        lines.append(("left out", f"{why} ({len(paths):,}): {abbreviate(paths)}{lacks}"))
    print(f"recipe    chosen for {source.root}, because no --config is given")
    for topic, text in lines + recipe.lines:
        print(textwrap.fill(text, 80, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)


def given_settings(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line, by name: --a.b=1, --a.b 1, and flags as True."""
    found: dict[str, Any] = {}
    for name, text in options(arguments):
        found[name] = True if text is None else value_of(name, text)
        if isinstance(found[name], dict):
            found |= {f"{name}.{key}": value for key, value in found[name].items()}
    return found


def value_of(name: str, text: str) -> Any:
    """A value as the parser will read it. YAML takes #8090a0 for a comment, and 1e-3 for text."""
    if name in TEXTS or text.startswith("#"):
        return text
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return configurations.load(text, f"--{name}")
    except UserError:
        return text


def without(arguments: list[str], name: str) -> list[str]:
    """`arguments` without a setting, in either spelling."""
    option = f"--{name}"
    pairs = pairwise(["", *arguments])
    return [word for before, word in pairs if option not in (before, word) and not word.startswith(f"{option}=")]


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={as_text(value)}" for name, value in settings.items()]
