"""`cait fit --help`: the settings that runs use most, and the network's fields, without waiting for Lightning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from typing import Literal, get_args, get_origin, get_type_hints

from cait.errors import UserError
from cait.model.config import VARIANTS, CaiTConfig, attention_backends

FIT = """\
usage: cait fit --config FILE [--config FILE ...] [--NAME VALUE ...]

Train. A setting on the command line wins over the configurations, and a later
configuration over an earlier one. [] is the default where nothing sets it.

The run
  --config FILE             YAML with any of these settings; configs/ has some
  --paper TABLE/ROW         settings of a row of the paper; see `cait paper`
  --run_name NAME           its folder in logs/ [the configuration's name]
  --seed_everything N       seed of everything random [0]
  --save_every_n_minutes N  minutes between checkpoints; an epoch saves too [10]
  --best_metric NAME        what chooses best.ckpt [val/acc1]
  --ema.decay SHARE         average the weights, with 0.9999 or so [null]
  --print_config            show what the run would use, and end
The model
  --model.name NAME         xxs24 to m48, timm/NAME, module:factory [xxs24]
  --model.fields.NAME V     a field of the network; --help=model lists them
  --model.drop_path_rate P  stochastic depth; null is the paper's rate [null]
  --model.pretrained true   start from timm's published weights [false]
  --model.weights FILE      start from the weights in a file [null]
  --model.distillation X    learn from --model.teacher: none, soft, hard [none]
The optimizer
  --model.lr RATE           peak rate, for lr_base_size images a step [0.0005]
  --model.lr_base_size N    null takes lr as it is, whatever the batch [512]
  --model.warmup_epochs N   length of the linear warm-up; then a cosine [5]
  --model.min_lr RATE       rate at the end of the cosine [1e-05]
  --model.weight_decay W    [0.05]
  --model.label_smoothing E [0.1]
  --model.optimizer NAME    adamw, one of timm's, package.module:factory [adamw]
The data
  --data.root FOLDER        train/<class>/* and val/<class>/* [data/imagenet]
  --data.img_size N         side of the images in pixels [224]
  --data.batch_size N       images in a batch of one process [128]
  --data.num_workers N      loader processes; null takes one a core [null]
  --data.repeats N          how often an epoch has each of its images [3]
  --data.auto_augment NAME  timm's policy, or null [rand-m9-mstd0.5-inc1]
  --data.mixup ALPHA        0 turns it off [0.8]
  --data.cutmix ALPHA       0 turns it off [1.0]
  --data.erase_prob P       random erasing [0.25]
The Trainer (Lightning's)
  --trainer.max_epochs N    length of the run [null]
  --trainer.accelerator X   auto, cpu, gpu [auto]
  --trainer.devices N       devices, with a process each [auto]
  --trainer.precision KIND  32-true, bf16-mixed, 16-mixed [null]
  --trainer.accumulate_grad_batches N   batches that make one step [1]
  --trainer.logger CLASS    a logger beside metrics.csv and TensorBoard [null]
  --trainer.callbacks+=CLASS   a callback; yours as package.module.Class [null]

cait fit --help=model       the network's fields
cait fit --help=all         every setting, with its type
cait fit --trainer.logger.help WandbLogger   what a class takes
"""
TOPICS = {"": "fit", "all": "all", "model": "model"}


def topic(arguments: list[str]) -> str | None:
    """What `--help` asks for: "fit", "all" or "model"; None if nothing does.

    Raises:
        UserError: there is no help of that name.
    """
    for place, argument in enumerate(arguments):
        option, _, word = argument.partition("=")
        if option in ("-h", "--help"):
            following = arguments[place + 1] if place + 1 < len(arguments) else ""
            word = word or (following if following in TOPICS else "")
            if word not in TOPICS:
                raise UserError(f"there is no --help={word}; there is --help, --help=model and --help=all")
            return TOPICS[word]
    return None


def fields() -> str:
    """The fields of the network: name, type, default and what they mean."""
    hints, about = get_type_hints(CaiTConfig), _docstrings()
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
        values = attention_backends() if field.name == "attention_backend" else get_args(hint)
        choices = " | ".join(map(str, values)) if hint is str or get_origin(hint) is Literal else ""
        kind = choices or (hint.__name__ if isinstance(hint, type) else str(hint).replace("None", "null"))
        default = json.dumps(field.default).strip('"')
        lines += textwrap.wrap(f"{field.name}: {kind} [{default}]", 76, initial_indent="  ", subsequent_indent="      ")
        lines += textwrap.wrap(about.get(field.name, ""), 76, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _docstrings() -> dict[str, str]:
    """The string under each field."""
    (tree,) = ast.parse(inspect.getsource(CaiTConfig)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
