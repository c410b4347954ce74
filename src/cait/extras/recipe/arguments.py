"""`cait fit --data.root DIR` without a configuration: add the settings of a chosen recipe to those given."""

import contextlib
import json
import math
import os
import sys
import textwrap
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from cait import plugins
from cait.cli.options import Line, Options
from cait.data.datamodule import PREPARATION
from cait.data.folder import FolderSource
from cait.data.source import open_source
from cait.errors import UserError, say, tell
from cait.extras.frames import told_of_frames
from cait.extras.recipe.figures import Survey, Trial, survey, this_machine
from cait.extras.recipe.race import OF_WEIGHTS, enter
from cait.extras.recipe.rules import Recipe, choose
from cait.extras.recipe.weights import CHANNELS, beside_a_configuration, weights_of
from cait.guards.configurations import is_overlay
from cait.references import is_path
from cait.run.program import Program
from cait.settings import Settings, group, is_in, nested

MINUTES = 3.0
"""Length of a run unless --minutes says another, from the command to its end."""
CHOSEN = "CAIT_RECIPE"
"""Passes the recipe of the first process to the others that Lightning starts."""


def add_recipe(line: Line, program: Program) -> None:
    """Let a recipe be chosen for the folder that is given, by --from and --minutes; it names the run.

    Nothing but the weights of --from is added if a line names a checkpoint, a configuration that is not an overlay, or
    no folder of class folders. Raises UserError if the minutes cannot be used.
    """
    options = Options("fit")
    options.add_argument("--from", dest="source", default="")
    options.add_argument("--minutes", type=float)
    options.add_argument("--race", choices=("true", "false"))
    asked, line.words = options.parse_known_args(line.words)
    if asked.minutes is not None and not 0 < asked.minutes < math.inf:
        raise UserError(f"--minutes must be a number above 0, got {asked.minutes:g}")
    line.steps.append(partial(settings_for, line, program, asked))


def settings_for(line: Line, program: Program, asked: Namespace, given: Settings) -> Settings:
    """The settings that a recipe adds to those that are `given`, or those of the weights that are asked for.

    Raises UserError if the folder or the weights cannot be used.
    """
    only_overlays = all(is_overlay(path, layer) for path, layer in line.layers if path)
    if "ckpt_path" in given or not only_overlays or not is_folder(given.get("data.root")):
        if asked.minutes is not None or asked.race == "true":
            name = "race" if asked.minutes is None else "minutes"
            raise UserError(f"--{name} is for a folder of images without a configuration")
        added = beside_a_configuration(asked.source)
        if asked.race:
            added["race"] = None  # the configuration may be of a run that raced
        kept = {*line.typed}
        if given.get("data.reader"):
            kept |= {"data.mean", "data.std"}  # of planes, as measured
        return {name: value for name, value in added.items() if not is_in(name, kept)}
    with contextlib.redirect_stdout(sys.stderr if "print_config" in line.typed else sys.stdout):
        recipe = chosen(given, asked, program)
    program.default_name = Path(given["data.root"]).resolve().name
    return recipe


def is_folder(root: Any) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders, and no data set of another kind."""
    may_be = isinstance(root, str) and (Path(root).is_dir() or not is_path(root))
    return may_be and all(
        open_other(root, {"root": root}) is None for open_other in plugins.of_kind("open_source")
    )


def chosen(given: Settings, asked: Namespace, program: Program) -> Settings:
    """The settings of the recipe, in all processes those of the first, which alone plans, asks the hub and prints."""

    def planned() -> str:
        try:
            return json.dumps(plan(given, asked, program))
        except UserError as error:
            return json.dumps(str(error))

    processes = program.processes
    is_from_lightning = processes.is_launched() and processes.started() == 1
    # Lightning has started this process with the arguments, and the choice, of the first
    is_chosen = is_from_lightning and CHOSEN in os.environ
    if not is_chosen:
        os.environ[CHOSEN] = processes.from_first(planned)
    settings = json.loads(os.environ[CHOSEN])
    if isinstance(settings, str):  # an error of the first process
        raise UserError(settings)
    return settings


def plan(given: Settings, asked: Namespace, program: Program) -> Settings:
    """Look at the folder, choose the settings of its recipe, and print why."""
    data = nested(given).get("data", {}) | {"in_chans": given.get(CHANNELS, 3)}
    source = open_source(data["root"], **data)
    assert isinstance(source, FolderSource)
    source.prepare()
    tell(f"reading {data['root']} ...")
    machine = this_machine(given)
    weights, reason = weights_of(asked.source, given, machine.gpus > 0)
    folder = survey(source, group(PREPARATION, data))
    tell("measuring a few steps on this machine ...")
    minutes = asked.minutes or MINUTES
    trial = Trial(program)
    recipe = choose(folder, machine, given, trial, weights, minutes)
    if "pretrained" in plugins.extras():
        recipe.take("baselines", True)
    names_weights = asked.source or given.get("model.weights") or given.get("model.pretrained")
    is_asked = asked.race == "true"
    if is_asked and not recipe.solves_head:
        raise UserError(
            "--race true is about a head that is solved on weights: name some, and no run, with --from"
        )
    if recipe.solves_head and (is_asked or not (names_weights or asked.race)):
        others = {name: value for name, value in given.items() if name not in OF_WEIGHTS}
        enter(recipe, choose(folder, machine, others, trial, None, minutes), is_asked)
    if reason:
        recipe.lines.insert(0, ("weights", reason))
    if scenes := told_of_frames(source):
        recipe.note("scenes", scenes)
    report(source, folder, recipe)
    return recipe.settings


def report(source: FolderSource, folder: Survey, recipe: Recipe) -> None:
    """Print what is in the folder, and the reasons of the recipe."""
    origin = " (held out, see validation.csv)" if source.holds_out else ""
    color = "gray" if folder.gray else "color"
    if recipe.held.get("data.reader"):
        color = "planes"
    images = (
        f"{folder.images:,} to train on, {folder.val:,} to validate on{origin}, {len(folder.counts)} classes, "
        f"{color}, about {folder.side} pixels"
    )
    say(f"recipe    chosen for {source.root}, because no --config is given")
    for topic, text in [("images", images), *recipe.lines]:
        say(textwrap.fill(text, 80, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)
