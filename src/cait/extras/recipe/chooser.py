"""`cait fit --data.root DIR` without a configuration: look at the folder, choose a recipe, say why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from cait.cli.options import asks_for_help
from cait.errors import UserError
from cait.guards.refusals import check_config, configurations_of, is_overlay
from cait.run.program import Program
from cait.settings import flatten, group

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

    `arguments` come back unchanged if they name a configuration that is not an overlay, a row of the paper, or no
    folder of class folders. `--from FILE|timm|RUN` is always replaced by the settings of the weights.

    Raises:
        UserError: the folder or the weights cannot be used.
    """
    given = _settings(arguments)
    source = given.pop(FROM, None)
    if source is not None:
        from cait.extras.recipe.weights import find

        start = find(str(source))
        arguments = _without(arguments, FROM)
    else:
        start = None
    root = given.get("data.root")
    elsewhere = not given.keys().isdisjoint({"paper_row", "ckpt_path"})
    configurations = configurations_of(arguments)
    overlays = [Path(path) for path in configurations if is_overlay(Path(path))]
    elsewhere = elsewhere or len(overlays) < len(configurations)
    if elsewhere or asks_for_help(arguments) or not isinstance(root, str) or not _is_folder(root):
        return [*(_written(start.settings) if start else []), *arguments]
    for path in overlays:
        check_config(path)
        given = flatten(yaml.safe_load(path.read_text(encoding="utf-8"))) | given
    try:
        recipe = _chosen(Path(root), given, start, program)
    except UserError:
        raise
    except (TypeError, ValueError):  # a value of the wrong type; the parser reports it
        return arguments
    name = re.sub(r"[^\w.=+-]+", "-", Path(root).resolve().name).strip("-.=+") or "own"
    dictionary = given.get("model.fields")
    if isinstance(dictionary, dict):  # it would replace the chosen fields instead of joining them
        arguments = [
            *_without(arguments, "model.fields"),
            *_written({f"model.fields.{k}": v for k, v in dictionary.items()}),
        ]
    program.default_name = name
    return [*_written(recipe), *arguments]


def _is_folder(root: str) -> bool:
    """Whether `root` is, or may be meant as, a folder of class folders."""
    from cait.extras.catalog import sets
    from cait.extras.catalog.imagenet import ARCHIVES
    from cait.extras.shards.source import is_shards
    from cait.references import is_path

    packed = any(Path(root, name).is_file() for name in ARCHIVES.values())
    return not (is_path(root) or sets.is_builtin(root) or is_shards(root) or packed)


def _chosen(root: Path, given: dict[str, Any], start: Any, program: Program) -> dict[str, Any]:
    from cait.data.folder import split_folders
    from cait.data.reading import Reading
    from cait.data.source import FolderSource, open_source
    from cait.extras.recipe.rules import choose
    from cait.extras.recipe.survey import left_out, survey

    settings = {key: given[f"data.{key}"] for key in SOURCE if f"data.{key}" in given}
    source = open_source(str(root), **settings)
    assert isinstance(source, FolderSource)
    source.prepare()
    reading = group(Reading, {name.removeprefix("data."): value for name, value in given.items()})
    folder = survey(source.train, source.val, source.class_names, reading)
    recipe = choose(folder, machine(given), given, start)
    if {os.environ.get(rank, "0") for rank in ("LOCAL_RANK", "SLURM_PROCID")} == {"0"}:
        train, val = split_folders(root, settings.get("train_split", "train"), settings.get("val_split", "val"))
        others = left_out([train, *([val] if val else [])], source.class_names)
        with contextlib.redirect_stdout(sys.stderr if "print_config" in given else sys.stdout):
            _print(root, folder, recipe.lines, others, val)
    words = program.processes.agree(json.dumps(recipe.settings))  # shares of the cores may differ
    return json.loads(words[0])


def machine(given: dict[str, Any]) -> Any:
    """What the run is going to train on."""
    import torch

    from cait.data.cores import share
    from cait.extras.recipe.duration import Machine
    from cait.extras.recipe.rules import COPIES

    on_cpu = given.get("trainer.accelerator") == "cpu" or not torch.cuda.is_available()
    free = _room(Path(str(given.get("data.copies_dir") or COPIES)))
    if on_cpu:
        return Machine(share(1), fast_bf16=_has_amx(), free=free)
    return Machine(share(1), torch.cuda.device_count(), torch.cuda.is_bf16_supported(), free)


def _room(copies: Path) -> float:
    """The disk, in 10⁹ bytes, that copies in this folder may take: what is free, and what earlier ones take."""
    there = next(place for place in (copies, *copies.absolute().parents) if place.is_dir())
    taken = sum(path.stat().st_size for path in copies.rglob("*.ppm"))
    return (shutil.disk_usage(there).free + taken) / 1e9


def _has_amx() -> bool:
    """Whether the processor has Intel's units for matrices in bfloat16; bfloat16 is slow without them."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text(errors="replace")


def _print(root: Path, folder: Any, lines: Iterable[tuple[str, str]], others: dict[str, int], val: Path | None) -> None:
    from cait.data.folder import NEEDS_HEIF
    from cait.data.listing import HEIF

    count = len(folder.counts)
    held = "" if val else " (held out, see validation.csv)"
    colour = "grey" if folder.grey else "colour"
    print(f"recipe    chosen for {root}, because no --config is given")
    rows = [
        (
            "images",
            f"{folder.images:,} to train on, {folder.val:,} to validate on{held}, {count} classes, {colour}, "
            f"about {folder.side} pixels",
        )
    ]
    if others:
        listed = ", ".join(f"{number:,} {kind}" for kind, number in list(others.items())[:4])
        rows.append(("left out", listed + (f"; {NEEDS_HEIF}" if others.keys() & {*HEIF} else "")))
    for topic, text in [*rows, *lines]:
        print(textwrap.fill(text, WIDTH, initial_indent=f"  {topic:10}", subsequent_indent=" " * 12))
    print("            Any setting can be given, as --trainer.max_epochs 50.", flush=True)


def _settings(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line, by name: --a.b=1, --a.b 1, and flags as True."""
    found: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, text = argument[2:].partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
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


def _written(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={_text(value)}" for name, value in settings.items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
