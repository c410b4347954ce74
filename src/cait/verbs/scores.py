"""How `cait eval` and `cait validate` score, show the scores as a table and write them as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cait import run
from cait.analysis.paper import find, released
from cait.callbacks.evaluation import Evaluation, Scores, own_metrics
from cait.data.folder import scan_extra_val
from cait.errors import UserError
from cait.lightning_cli import CaiTCLI


class ScoringCLI(CaiTCLI):
    """`validate` with the scores of `Evaluation`, on ImageNet-V2 too, shown and written."""

    def before_validate(self) -> None:
        # Refuse now what cannot work, not after an hour.
        config = self.config.validate
        if self.trainer.limit_val_batches == 0:
            raise UserError("--trainer.limit_val_batches 0 scores nothing")
        self.output = Path(config.output or run.EVALUATION)
        make_room(self.output)
        self.extra_val = scan_extra_val(Path(config.v2), self.datamodule.class_names) if config.v2 else None
        row = find(config.paper_row) if config.paper_row else None
        self.paper_row = row if row and row.is_of(self.model.hparams) else None  # a setting beside it may win
        if self.paper_row is None and config.model.pretrained and config.ckpt_path is None:
            self.paper_row = released(self.model.name, self.datamodule.img_size)
        self.evaluation = Evaluation(self.datamodule, config.real)
        self.trainer.callbacks.append(self.evaluation)  # type: ignore[attr-defined]  # behind EMA

    def after_validate(self) -> None:
        scores = self.evaluation.scores
        if self.extra_val is not None:
            loader = self.datamodule.extra_val_dataloader(self.extra_val)
            self.trainer.datamodule = None  # type: ignore[attr-defined]  # it would list all its images again
            self.trainer.validate(self.model, loader, verbose=False)
            for weights, extra in self.evaluation.scores.items():
                scores[weights]["v2"] = extra
        if not self.trainer.is_global_zero:
            return
        result = self._about(scores) | scores
        print(f"{result['weights']} at {result['img_size']} pixels, crop {result['crop_pct']}")
        Console().print(as_table(result))
        write(result, self.output)
        print(f"by class, and the confusion matrix: {self.output}")

    def _about(self, scores: dict[str, Scores]) -> Scores:
        """What was scored."""
        config, model, data, row = self.config.validate, self.model, self.datamodule, self.paper_row
        return {
            "weights": config.ckpt_path or config.model.weights or f"timm's {model.name}",
            "epoch": self.checkpoint_epoch if config.ckpt_path else None,
            "step": self.checkpoint_step if config.ckpt_path else None,
            "model": model.name,
            "img_size": data.img_size,
            "crop_pct": config.data.crop_pct,
            "root": str(data.root),
            "real": (config.real or "timm's") if "real" in scores["raw"] else None,
            "v2": config.v2,
            "paper_row": row.id if row else None,
            "published": row.published if row else {},
            "class_names": data.class_names,
        }


def make_room(path: Path) -> None:
    """Make the folder of `path` before the work whose result goes there.

    Raises:
        UserError: `path` is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file with --output")


def write(result: Scores, path: Path) -> None:
    """Write `result` as JSON, each file whole or not at all.

    An array goes into a file of its own beside `path`, named after its place in `result`, as
    evaluation-raw-confusion.npy. The JSON has that name in its place.
    """
    result = _arrays_out(result, path.with_suffix(""))
    with run.whole(path) as beside:
        beside.write_text(json.dumps(result, ensure_ascii=False) + "\n")


def _arrays_out(result: Scores, stem: Path) -> Scores:
    """`result` with the names of files in place of its arrays."""
    result = result.copy()
    for key, value in result.items():
        file = stem.with_name(f"{stem.name}-{key}.npy")
        if isinstance(value, dict):
            result[key] = _arrays_out(value, stem.with_name(f"{stem.name}-{key}"))
        elif isinstance(value, np.ndarray):
            with run.whole(file) as beside, beside.open("wb") as out:
                np.save(out, value)
            result[key] = file.name
    return result


def as_table(result: Scores) -> Table:
    """The scores of the raw weights and of their average, beside the published ones."""
    ours = {name: result[key] for key, name in (("raw", "raw"), ("ema", "EMA")) if key in result}
    table = Table("")
    for name in (*ours, *result["published"]):
        table.add_column(name, justify="right")
    for title, form, key, part in (
        ("top-1", "{:.2f} %", "acc1", None),
        ("top-5", "{:.2f} %", "acc5", None),
        ("loss", "{:.4f}", "loss", None),
        *((name, "{:.4f}", name, None) for name in own_metrics(result["raw"])),
        ("images", "{:,}", "images", None),
        ("ReaL top-1", "{:.2f} %", "acc1", "real"),
        ("ReaL top-5", "{:.2f} %", "acc5", "real"),
        ("ReaL images", "{:,}", "images", "real"),
        ("V2 top-1", "{:.2f} %", "acc1", "v2"),
        ("V2 top-5", "{:.2f} %", "acc5", "v2"),
        *((f"V2 {name}", "{:.4f}", name, "v2") for name in own_metrics(result["raw"])),
        ("V2 images", "{:,}", "images", "v2"),
    ):
        values = [(column.get(part, {}) if part else column).get(key) for column in ours.values()]
        # Published is top-1, under the name of the set unless that is the validation set.
        published = [column.get(part or key) if key == "acc1" else None for column in result["published"].values()]
        if any(value is not None for value in values + published):
            shown = ["" if value is None else form.format(value) for value in values]
            table.add_row(title, *shown, *("" if value is None else f"{value} %" for value in published))
    return table
