"""`cait fit --data.root DIR` without a configuration: add the settings of a chosen recipe to those given."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from cait import plugins
from cait.cli.options import Options, asks_for_help
from cait.data.folder import FolderSource
from cait.data.reading import Reading
from cait.data.source import open_source
from cait.errors import UserError, say, tell
from cait.extras.frames import told_of_frames
from cait.extras.recipe.figures import Settings, Survey, Trial, data_arguments, survey, this_machine
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.weights import beside_a_configuration, weights_of
from cait.guards import configurations
from cait.guards.configurations import config_files, is_overlay, options
from cait.references import is_path
from cait.run.program import Program
from cait.settings import as_text, flatten, group

MINUTES = 3.0
"""Length of a run unless --minutes says another, from the command to its end."""
CHOSEN = "CAIT_RECIPE"
"""Passes the recipe of the first process to the others that Lightning starts."""
TEXTS = ("data.root", "data.train_split", "data.val_split")
"""Settings that stay text where YAML would read a number, as in a folder 2024."""


def add_recipe(arguments: list[str], program: Program) -> list[str]:
    """`arguments` and the recipe chosen for their folder, in place of --from and --minutes; it names the run.

    Nothing but the weights of --from is added if they name a checkpoint, a configuration that is not an overlay, or no
    folder of class folders. Raises UserError if the folder, the weights or the minutes cannot be used.
    """
    if asks_for_help(arguments):
        return arguments
    own = Options("fit", "")
    own.add_argument("--from", dest="source", default="")
    own.add_argument("--minutes", type=float)
    asked, arguments = own.parse_known_args(arguments)
    given = given_settings(arguments)
    files = config_files(arguments)
    if "ckpt_path" in given or not all(map(is_overlay, files)) or not is_folder(given.get("data.root")):
        if asked.minutes is not None:
            raise UserError("--minutes is for a folder of images without a configuration: give --trainer.max_time")
        return [*as_arguments(beside_a_configuration(asked.source)), *arguments]
    minutes = MINUTES if asked.minutes is None else asked.minutes
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes must be a number above 0, got {minutes:g}")
    for path in files:
        given = flatten(configurations.settings(path)) | given
    recipe = chosen(given, asked.source, minutes, program)
    folder = Path(given["data.root"]).resolve().name
    program.default_name = re.sub(r"[^\w.=+-]+", "-", folder).strip("-.=+") or "own"
    return [*arguments, *as_arguments(recipe)]  # after them, because a dictionary of fields would replace those chosen


def is_folder(root: Any) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders, and no data set of another kind."""
    if not isinstance(root, str) or (is_path(root) and not Path(root).is_dir()):
        return False
    return all(open_other(root, {"root": root}) is None for open_other in plugins.of_kind("open_source"))


def chosen(given: dict[str, Any], source: str, minutes: float, program: Program) -> dict[str, Any]:
    """The settings of the recipe, in all processes those of the first, which alone plans, asks the hub and prints.

    None of them if a value is of the wrong type, which the parser reports.
    """

    def planned() -> str:
        try:
            return json.dumps(plan(given, source, minutes))
        except UserError as error:
            return json.dumps(str(error))
        except (TypeError, ValueError, ArithmeticError):
            return "{}"

    is_from_lightning = "LOCAL_RANK" in os.environ and CHOSEN in os.environ and program.processes.started() == 1
    if not is_from_lightning:  # which started this process with the arguments of the first
        os.environ[CHOSEN] = program.processes.of_first(planned)
    found = json.loads(os.environ[CHOSEN])
    if isinstance(found, str):
        raise UserError(found)
    return found


def plan(given: dict[str, Any], from_: str, minutes: float) -> dict[str, Any]:
    """Look at the folder, choose the settings of its recipe, and print why."""
    data = data_arguments(given)
    source = open_source(data["root"], **data)
    assert isinstance(source, FolderSource)
    source.prepare()
    tell(f"reading {data['root']} ...")
    machine = this_machine(given)
    weights, reason = weights_of(from_, given, machine.gpus > 0)
    folder = survey(source, group(Reading, data))
    tell("measuring the speed of this machine ...")
    recipe = choose(folder, machine, given, Trial(), weights, minutes)
    if "pretrained" in plugins.extras():
        recipe.take("baselines", True)
    recipe.lines[:0] = [("weights", reason)] if reason else []
    if scenes := told_of_frames(source):
        recipe.note("scenes", scenes)
    with contextlib.redirect_stdout(sys.stderr if "print_config" in given else sys.stdout):
        report(source, folder, recipe)
    return recipe.settings


def report(source: FolderSource, folder: Survey, recipe: Recipe) -> None:
    """Print what is in the folder, and the reasons of the recipe."""
    held = " (held out, see validation.csv)" if source.holds_out else ""
    colour = "grey" if folder.grey else "colour"
    images = f"{folder.images:,} to train on, {folder.val:,} to validate on{held}, {len(folder.counts)} classes, "
    say(f"recipe    chosen for {source.root}, because no --config is given")
    for topic, text in [("images", f"{images}{colour}, about {folder.side} pixels"), *recipe.lines]:
        say(textwrap.fill(text, 80, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)


def given_settings(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line, by name: --a.b=1, --a.b 1, and flags as True."""
    found = {name: True if text is None else value_of(name, text) for name, text in options(arguments)}
    return flatten(found)


def value_of(name: str, text: str) -> Any:
    """A value as the parser will read it. YAML takes #8090a0 for a comment."""
    if name in TEXTS or text.startswith("#"):
        return text
    with contextlib.suppress(UserError):
        return configurations.load(text, f"--{name}")
    return text


def as_arguments(settings: Settings) -> list[str]:
    return [f"--{name}={as_text(value)}" for name, value in settings.items()]
