"""What `cait eval` has written about a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cait import ckpt, disk
from cait.cli import saved
from cait.errors import UserError
from cait.extras.words import root_name
from cait.run import rundir

SEVERAL = {"average_precision": "average precision", "f1": "F1", "thresholds": "threshold"}
"""Figures of each class if an image may have several, under `multi_label`, and their titles."""
NUMBER = (int, float)
FIGURES = {
    **{"acc1": NUMBER, "images": int, "per_class": {...: (int, float, type(None))}, "acc5?": NUMBER},
    **{"acc1_macro?": NUMBER, "mAP?": NUMBER, "f1?": NUMBER, "calibration?": {"ece?": NUMBER}},
    "thresholds?": [{"threshold": NUMBER, "coverage": NUMBER, "accuracy?": NUMBER}],
    "multi_label?": {key: {...: (int, float, type(None))} for key in SEVERAL},
}
SET = {"images": int, "acc1?": NUMBER, "acc5?": NUMBER, "acc1_macro?": NUMBER, "calibration?": {"ece?": NUMBER}}
FIGURES |= {"real?": SET, "v2?": SET, "extra?": {...: SET}}
ABOUT = {
    **{"model": str, "epoch": int, "step": int, "img_size": int, "root": str, "class_names": [str]},
    **{"raw": FIGURES, "ema?": FIGURES, "tta?": str},
}
"""What the extras that call `read` take from it, see `cait.disk.check_shape`."""


def of_several(found: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, ...]]:
    """A class and its figures of `SEVERAL` in words, for each of `multi_label`; empty where nothing is known."""
    names, columns = found["thresholds"], [found[what] for what in SEVERAL]
    figures = {name: [column.get(name) for column in columns] for name in names}
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
        about: dict[str, Any] = disk.read_json(path, ABOUT, folder)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: `{again}` writes it") from error
    except UserError as error:
        raise UserError(f"{error}; score the run again with `{again}`") from error
    step = ckpt.read_checkpoint(checkpoint)["global_step"]
    root = root_name(str(saved.data_settings(folder).get("root")))
    if (about["step"], about["root"]) != (step, root):
        scored = f"{path} is of step {about['step']} of {about['root']}, the run of step {step} of {root}"
        raise UserError(f"{scored}: score it again with `{again}`")
    for part in {"raw", "ema"} & about.keys():
        about[part] = {name: value for name, value in about[part].items() if value is not None}
    return about
