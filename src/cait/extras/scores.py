"""What `cait eval` has written about a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cait import ckpt
from cait.cli import saved
from cait.errors import UserError, one_line
from cait.extras.root_name import root_name
from cait.run import rundir

KEYS = {"model", "epoch", "img_size", "class_names", "raw"}
FIGURES = {"acc1", "images", "per_class"}
"""What the extras that call `read` take from it."""

SEVERAL = {"average_precision": "average precision", "f1": "F1", "thresholds": "threshold"}
"""Figures of each class if an image may have several, under `multi_label`, and their titles."""


def of_several(found: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, ...]]:
    """A class and its figures of `SEVERAL` in words, for each of `multi_label`; empty where nothing is known."""
    names, columns = found["thresholds"], [found[what] for what in SEVERAL]
    figures = {name: [column[name] for column in columns] for name in names}
    return [(name, *("" if each is None else f"{each:.4f}" for each in of_class)) for name, of_class in figures.items()]


def read(folder: Path, checkpoint: Path, again: str) -> dict[str, Any]:
    """The content of a run's evaluation.json.

    Args:
        again: what to type to score the run.

    Raises:
        UserError: the run was not scored, or its scores are of another step or data set than the checkpoint.
    """
    path = folder / rundir.EVALUATION
    try:
        about = dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: `{again}` writes it") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    step = ckpt.read_checkpoint(checkpoint, without=ckpt.TENSORS)["global_step"]
    root = root_name(str(saved.data_settings(folder).get("root")))
    scored = about.get("step"), about.get("root")
    if scored != (step, root):
        scored_of = "step {} of {}".format(*scored)
        raise UserError(f"{path} is of {scored_of}, the run of step {step} of {root}: score it again with `{again}`")
    raw = about.get("raw")
    if not (about.keys() >= KEYS and isinstance(raw, dict) and raw.keys() >= FIGURES):
        raise UserError(f"{path} is not what `{again}` writes today: score the run again")
    return about
