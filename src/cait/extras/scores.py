"""What `cait eval` has written about a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cait import ckpt, disk
from cait.cli import saved
from cait.errors import UserError
from cait.extras.display import root_name
from cait.run import rundir

NUMBER = (int, float)
SET = {"images": int, **dict.fromkeys(("acc1?", "acc5?", "acc1_macro?", "mAP?", "f1?"), NUMBER)}
FIGURES = {**SET, "per_class": {...: (int, float, type(None))}, "real?": SET, "extra?": {...: SET}}
ABOUT = {
    **{"model": str, "epoch": int, "step": int, "img_size": int, "root": str, "class_names": [str]},
    **{"raw": FIGURES, "ema?": FIGURES},
}
"""What the extras that call `read` take from it, see `cait.disk.check_shape`."""
WEAKEST = 5
"""So many of the classes with the lowest accuracy are named."""


def weakest(per_class: Mapping[str, float | None]) -> list[tuple[float, str]]:
    """Accuracy in percent and name of the classes below 100 %, the lowest first."""
    return sorted((share, name) for name, share in per_class.items() if share is not None and share < 100)


def read(folder: Path, checkpoint: Path, again: str) -> dict[str, Any]:
    """The content of a run's evaluation.json; `again` is what to type to score the run.

    Raises UserError if the run was not scored, or its scores are of another step, data set or preparation of images.
    """
    path = folder / rundir.EVALUATION
    try:
        about: dict[str, Any] = disk.read_json(path, ABOUT)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: `{again}` writes it") from error
    except UserError as error:
        raise UserError(f"{error}; score the run again with `{again}`") from error
    content = ckpt.read_checkpoint(checkpoint)
    step, prepared = content["global_step"], (ckpt.data_state(content) or {}).get("preprocessing") or {}
    data = saved.data_settings(folder)
    root, split = root_name(str(data.get("root"))), data.get("val_split")
    if (about["step"], about["root"]) != (step, root):
        scored = f"{path} is of step {about['step']} of {about['root']}, the run of step {step} of {root}"
        raise UserError(f"{scored}: score it again with `{again}`")
    if about.get("val_split", split) != split:
        raise UserError(f"{path} is of {about['val_split']}, the run's is {split}: score it again with `{again}`")
    if any(about.get(name, value) != value for name, value in prepared.items()):
        raise UserError(f"{path} is of images prepared otherwise than the run's: score it again with `{again}`")
    for part in {"raw", "ema"} & about.keys():
        about[part] = {name: value for name, value in about[part].items() if value is not None}
    return about
