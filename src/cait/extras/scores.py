"""What `cait eval` has written about a run."""

from collections.abc import Mapping
from pathlib import Path

from cait import ckpt, disk
from cait.cli import saved
from cait.errors import UserError
from cait.extras.display import root_name
from cait.run import rundir
from cait.settings import Settings

NUMBER = (int, float)
SET = {"images": int, **dict.fromkeys(("acc1?", "acc5?", "acc1_macro?", "mAP?", "f1?"), NUMBER)}
FIGURES = {**SET, "per_class": {...: (*NUMBER, type(None))}, "real?": SET, "extra?": {...: SET}}
ABOUT = {
    "model": str,
    "epoch": int,
    "step": int,
    "img_size": int,
    "root": str,
    "class_names": [str],
    "raw": FIGURES,
    "ema?": FIGURES,
}
"""What the extras that call `read` take from it, see `cait.disk.check_shape`."""
WEAKEST = 5
"""So many of the classes with the lowest accuracy are named."""


def weakest(per_class: Mapping[str, float | None]) -> list[tuple[float, str]]:
    """Accuracy in percent and name of the classes below 100 %, the lowest first."""
    return sorted(
        (share, name) for name, share in per_class.items() if share is not None and share < 100
    )


def read(folder: Path, checkpoint: Path, again: str) -> Settings:
    """The content of a run's evaluation.json; `again` is what to type to score the run.

    Raises UserError if the run was not scored, or its scores are of another step, data set or preparation of images.
    """
    path = folder / rundir.EVALUATION
    try:
        about: Settings = disk.read_json(path, ABOUT)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: `{again}` writes it") from error
    except UserError as error:
        raise UserError(f"{error}; score the run again with `{again}`") from error
    content = ckpt.read_checkpoint(checkpoint)
    step = content["global_step"]
    prepared = (ckpt.data_state(content) or {}).get("preprocessing") or {}
    data = saved.data_settings(folder)
    root = root_name(str(data.get("root")))
    split = data.get("val_split")
    problem = ""
    if (about["step"], about["root"]) != (step, root):
        problem = f"step {about['step']} of {about['root']}, the run of step {step} of {root}"
    elif about.get("val_split", split) != split:
        problem = f"{about['val_split']}, the run's is {split}"
    elif any(about.get(name, value) != value for name, value in prepared.items()):
        problem = "images prepared otherwise than the run's"
    if problem:
        raise UserError(f"{path} is of {problem}: score it again with `{again}`")
    for weights in {"raw", "ema"} & about.keys():
        about[weights] = {
            name: value for name, value in about[weights].items() if value is not None
        }
    return about
