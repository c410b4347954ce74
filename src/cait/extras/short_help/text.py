"""`cait fit --help`: the settings that runs use most, and the network's fields, read without importing torch."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import cait
from cait import plugins
from cait.cli.options import SETTINGS
from cait.errors import UserError
from cait.model.config import VARIANTS, CaiTConfig, attention_backends, stems
from cait.settings import documented, sentences

HEAD = """\
usage: cait fit --config FILE [--config FILE ...] [--NAME VALUE ...]

Train. A setting on the command line wins over the configurations, and a later
configuration over an earlier one. [] is the default where nothing sets it.
"""
FOOT = """\
cait fit --help=model       the network's fields
cait fit --help=all         every setting, with its type
cait fit --trainer.logger.help WandbLogger   what a class takes
"""
SHOWN = {
    "The run": "run_name seed_everything save_every_n_minutes best_metric ema.decay",
    "The model": "model.name model.fields model.drop_path_rate model.pretrained model.weights model.distillation",
    "The optimizer": "model.lr model.lr_base_size model.warmup_epochs model.schedule model.min_lr "
    "model.weight_decay model.label_smoothing model.optimizer",
    "The data": "data.root data.img_size data.batch_size data.num_workers data.repeats data.auto_augment data.mixup "
    "data.cutmix data.erase_prob",
    "The Trainer (Lightning's)": "trainer.max_epochs trainer.accelerator trainer.devices trainer.precision "
    "trainer.accumulate_grad_batches trainer.callbacks",
}
LIGHTNINGS = {
    "seed_everything": ("0", "Seed of everything random."),
    "ema.decay": ("null", "Average the weights, with 0.9999 or so."),
    "trainer.max_epochs": ("null", "Length of the run."),
    "trainer.accelerator": ("auto", "auto, cpu or gpu."),
    "trainer.devices": ("auto", "Devices, with a process each."),
    "trainer.precision": ("null", "32-true, bf16-mixed or 16-mixed."),
    "trainer.accumulate_grad_batches": ("1", "Batches that make one step."),
    "trainer.callbacks": ("null", "+=CLASS adds a callback; yours as package.module.Class."),
}
"""Settings that no group of this package has, with their defaults."""
TOPICS = ("", "model", "all")
SOURCE = Path(cait.__file__).parent


def topic(arguments: list[str]) -> str:
    """What `--help` asks for: "model", "all", or "" for the settings that runs use most.

    Raises:
        UserError: there is no help of that name.
    """
    for argument, following in itertools.pairwise([*arguments, ""]):
        option, _, word = argument.partition("=")
        if option in ("-h", "--help"):
            word = word or (following if following in TOPICS else "")
            if word not in TOPICS:
                raise UserError(f"there is no --help={word}; there is --help, --help=model and --help=all")
            return word
    return ""


def fit() -> str:
    """The settings that runs use most: name, sentence and default."""
    settings = [*SETTINGS, *plugins.settings()]
    known = {setting.name: (json.dumps(setting.default).strip('"'), setting.help) for setting in settings}
    known |= LIGHTNINGS | {name: field for group in ("model", "data") for name, field in _fields_of(group)}
    lines = [HEAD]
    for title, names in SHOWN.items():
        lines += [title, *(line for name in names.split() for line in _row(name, *known[name]))]
    return "\n".join([*lines, "", FOOT.rstrip()])


def _row(name: str, default: str, sentence: str) -> Iterable[str]:
    clause = re.split(r"\.(?: |$)", sentence)[0]
    text = f"{clause} [{default}]"
    head = f"  --{name}"
    if len(head) > 26:
        yield head
        head = ""
    yield from textwrap.wrap(text, 80, initial_indent=f"{head:28}", subsequent_indent=" " * 28)


def _fields_of(group: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (default, sentence)) of each setting of a group, from the source of its dataclasses."""
    rooms = {"model": ("model", "train"), "data": ("data",)}[group]
    for file in (file for room in rooms for file in sorted(SOURCE.joinpath(room).glob("*.py"))):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.decorator_list and node.name != CaiTConfig.__name__:
                about = sentences(node.body)
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and (name := ast.unparse(field.target)) in about:
                        yield f"{group}.{name}", (_shown(field.value), about[name])


def _shown(default: ast.expr | None) -> str:
    if default is None:
        return ""
    try:
        return json.dumps(ast.literal_eval(default)).strip('"')
    except ValueError:  # an expression stays as it is written
        return ast.unparse(default)


def fields() -> str:
    """The fields of the network: name, type, default and what they mean."""
    hints, about = get_type_hints(CaiTConfig), documented(CaiTConfig)
    lines = [
        "The fields of CaiT, given as --model.fields.NAME VALUE or in a configuration as",
        "model: {fields: {depth: 36}}. A named model sets some of them:",
        *(f"  {name:5} " + ", ".join(f"{key} {value}" for key, value in row.items()) for name, row in VARIANTS.items()),
        "",
    ]
    for field in dataclasses.fields(CaiTConfig):
        if field.name in ("img_size", "num_classes", "drop_path_rate"):
            continue  # settings of their own
        hint = hints[field.name]
        values = {"attention_backend": attention_backends(), "stem": list(stems())}.get(field.name, get_args(hint))
        choices = " | ".join(map(str, values)) if hint is str or get_origin(hint) is Literal else ""
        kind = choices or (hint.__name__ if isinstance(hint, type) else str(hint).replace("None", "null"))
        default = json.dumps(field.default).strip('"')
        lines += textwrap.wrap(f"{field.name}: {kind} [{default}]", 76, initial_indent="  ", subsequent_indent="      ")
        lines += textwrap.wrap(about.get(field.name, ""), 76, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
