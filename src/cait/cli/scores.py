"""How `cait eval` and `cait validate` score, show the scores as a table and write them as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from rich.table import Table

from cait import disk
from cait.cli.lightning import CaiTCLI
from cait.data.folder import abbreviate, scan_extra_val
from cait.errors import UserError
from cait.extras.evaluation import calibration
from cait.extras.evaluation.callback import Evaluation, Scores, own_metrics
from cait.extras.evaluation.extra_sets import ALEXNET, Corruptions, ExtraSet, mce, open_extra
from cait.extras.paper.rows import find, released
from cait.run import rundir

EXTRA = """Folder of another evaluation set of the same classes, or of some, under a name of yours: --extra.sketch DIR.
ImageNet-A, -R and -Sketch go by their WordNet folders, ImageNet-C by its corruptions and severities."""
TTA = "Test-time augmentation: hflip scores the mean of the probabilities of an image and its mirror image."
WANTED = "Accuracy from 0 to 1; finds the probability from which on the answers reach it, for images never to guess at."
WEAKEST, CONFUSED, FEW = 5, 3, 5
"""The screen shows at most so many classes, pairs and names."""


class ScoringCLI(CaiTCLI):
    """`validate` with the scores of `Evaluation`, on further sets too, shown and written."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--extra", type=dict[str, str] | None, default=None, help=EXTRA)
        parser.add_argument("--tta", type=Literal["hflip"] | None, default=None, help=TTA)
        parser.add_argument("--wanted_accuracy", type=float | None, default=None, help=WANTED)

    def configuration(self, path: Path, known: Collection[str]) -> dict[str, Any]:
        return self.plain_configuration(path, known)

    def before_validate(self) -> None:
        # Refuse now what cannot work, not after an hour.
        config = self.config.validate
        if self.trainer.limit_val_batches == 0:
            raise UserError("--trainer.limit_val_batches 0 scores nothing")
        if config.wanted_accuracy is not None and not 0 < config.wanted_accuracy <= 1:
            raise UserError(f"--wanted_accuracy is above 0 and at most 1, as 0.95; got {config.wanted_accuracy}")
        self.output = Path(config.output or rundir.EVALUATION)
        make_room(self.output)
        names = self.datamodule.class_names
        self.v2 = ExtraSet(scan_extra_val(Path(config.v2), names)) if config.v2 else None
        self.extra = {name: open_extra(Path(root), names) for name, root in (config.extra or {}).items()}
        row = find(config.paper_row) if config.paper_row else None
        self.paper_row = row if row and row.is_of(self.model.hparams) else None  # a setting beside it may win
        if self.paper_row is None and config.model.pretrained and config.ckpt_path is None:
            self.paper_row = released(self.model.name, self.datamodule.img_size)
        self.evaluation = Evaluation(self.datamodule, config.real, config.tta == "hflip", config.wanted_accuracy)
        self.trainer.callbacks.append(self.evaluation)  # type: ignore[attr-defined]  # after EMA

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Score without Lightning's table: ours has its figures."""
        self.trainer.validate(*args, **kwargs | {"verbose": False})

    def after_validate(self) -> None:
        scores = self.evaluation.scores
        self.trainer.datamodule = None  # type: ignore[attr-defined]  # the data module would list all its images again
        if self.v2 is not None:
            for weights, extra in self._score(self.v2).items():
                scores[weights]["v2"] = extra
        for name, found in self.extra.items():
            scored = self._score(found) if isinstance(found, ExtraSet) else self._score_corrupted(found)
            for weights, extra in scored.items():
                scores[weights].setdefault("extra", {})[name] = extra
        if not self.trainer.is_global_zero:
            return
        result = self._about(scores) | scores
        show(result)
        write(result, self.output)
        drawn = draw(result, self.output)
        print(f"by class, and the confusion matrix: {self.output}")
        print(f"how far to trust the probabilities: {os.path.relpath(drawn)}")

    def _score(self, found: ExtraSet) -> dict[str, Scores]:
        """The scores of a further set, by weights."""
        self.evaluation.only = found.only
        self.trainer.validate(self.model, self.datamodule.extra_val_dataloader(found.samples), verbose=False)
        classes = {} if found.only is None else {"classes": len(found.only)}
        return {weights: scores | classes for weights, scores in self.evaluation.scores.items()}

    def _score_corrupted(self, found: Corruptions) -> dict[str, Scores]:
        """Top-1 by corruption and severity, its mean, and the mean corruption error."""
        cells = [(name, severity) for name, sets in found.items() for severity in sets]
        scored = {}
        for name, severity in cells:  # keep two figures of each: the confusion matrices would fill the memory
            every = self._score(found[name][severity])
            scored[name, severity] = {
                weights: {key: of[key] for key in ("acc1", "images")} for weights, of in every.items()
            }
        result: dict[str, Scores] = {}
        for weights in self.evaluation.scores:
            acc1 = {
                name: {severity: scored[name, severity][weights]["acc1"] for severity in sets}
                for name, sets in found.items()
            }
            means = {name: sum(values.values()) / len(values) for name, values in acc1.items()}
            whole = all(len(values) == 5 for values in acc1.values())
            imagenet = len(self.datamodule.class_names) == 1000
            result[weights] = {
                "acc1": sum(means.values()) / len(means),
                "images": sum(scored[cell][weights]["images"] for cell in cells),
                "mce": mce({name: 100 - mean for name, mean in means.items()}) if whole and imagenet else None,
                "corruptions": acc1,
            }
        return result

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
            "tta": config.tta,
            "root": str(data.root),
            "real": (config.real or "timm's") if "real" in scores["raw"] else None,
            "v2": config.v2,
            "extra": config.extra or {},
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

    Each array goes into a file of its own beside `path`, named after its place in `result`, such as
    evaluation-raw-confusion.npy. The JSON holds that name instead.
    """
    result = _arrays_out(result, path.with_suffix(""))
    with disk.whole(path) as beside:
        # A name that is no text is escaped, which JSON allows.
        beside.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")


def _arrays_out(result: Scores, stem: Path) -> Scores:
    """`result` with the names of files in place of its arrays."""
    result = result.copy()
    for key, value in result.items():
        file = stem.with_name(f"{stem.name}-{key}.npy")
        if isinstance(value, dict):
            result[key] = _arrays_out(value, stem.with_name(f"{stem.name}-{key}"))
        elif isinstance(value, np.ndarray):
            with disk.whole(file) as beside, beside.open("wb") as out:
                np.save(out, value)
            result[key] = file.name
    return result


def draw(result: Scores, path: Path) -> Path:
    """Draw the reliability diagram beside `path`; returns its file."""
    from cait import plots

    drawn = path.with_name(f"{path.stem}-reliability.png")
    figure = calibration.diagram({title: scores["calibration"] for title, scores in _by_weights(result).items()})
    plots.write(figure, drawn)
    return drawn


def show(result: Scores) -> None:
    """Print the scores, short."""
    console = Console()
    views = ", with mirror images" if result["tta"] else ""
    print(f"{result['weights']} at {result['img_size']} pixels, crop {result['crop_pct']}{views}")
    console.print(as_table(result))
    for name, scores in result["raw"].get("extra", {}).items():
        if "corruptions" in scores:
            console.print(_corruption_table(name, scores))
    console.print(_threshold_table(result["raw"]))
    for line in remarks(result["raw"]):
        console.print(line, markup=False, highlight=False)


def remarks(scores: Scores) -> Iterator[str]:
    """What the figures of a whole set hide."""
    shares = [(share, name) for name, share in scores["per_class"].items() if share is not None and share < 100]
    if shares:
        weakest = [f"{name} ({share:.1f} %)" for share, name in sorted(shares, key=lambda each: each[0])]
        yield f"weakest classes: {abbreviate(weakest, WEAKEST)}"
    if never := scores["never_predicted"]:
        yield f"never predicted: {abbreviate(never, FEW)}"
    if pairs := scores["confusions"]:
        few = [f"{pair['true']} taken for {pair['predicted']} ({pair['images']:,})" for pair in pairs[:CONFUSED]]
        yield f"most confused: {', '.join(few)}"
    if reached := scores["wanted_accuracy"]:
        if reached["threshold"] is None:
            yield f"no probability is high enough: no answers are right {reached['wanted']:g} % of the time"
        else:
            yield (
                f"for {reached['wanted']:g} % accuracy: answer from a probability of {reached['threshold']:.4f} on, "
                f"which {reached['coverage']:.1f} % of the images have"
            )


def _by_weights(result: Scores) -> dict[str, Scores]:
    return {name: result[key] for key, name in (("raw", "raw"), ("ema", "EMA")) if key in result}


def _part(scores: Scores, part: tuple[str, ...]) -> Scores:
    for key in part:
        scores = scores.get(key, {})
    return scores


def as_table(result: Scores) -> Table:
    """The scores of the raw weights and of their average, beside the published ones."""
    ours = _by_weights(result)
    table = Table("")
    for name in (*ours, *result["published"]):
        table.add_column(name, justify="right")
    parts: dict[str, tuple[str, ...]] = {"": (), "ReaL ": ("real",), "V2 ": ("v2",)}
    parts |= {f"{name} ": ("extra", name) for name in result["raw"].get("extra", {})}
    for before, part in parts.items():
        for title, form, key in (
            ("top-1", "{:.2f} %", "acc1"),
            ("top-5", "{:.2f} %", "acc5"),
            *([] if part else [("mean of the classes", "{:.2f} %", "acc1_macro"), ("loss", "{:.4f}", "loss")]),
            *((name, "{:.4f}", name) for name in own_metrics(result["raw"])),
            *([] if part else [("calibration error", "{:.2f} %", "ece")]),
            ("mCE", "{:.2f} %", "mce"),
            ("images", "{:,}", "images"),
            ("classes", "{:,}", "classes"),
        ):
            found = [_part(scores, (*part, "calibration") if key == "ece" else part) for scores in ours.values()]
            # Only top-1 is published, under the set's name, or `acc1` for the validation set.
            published = [column.get(part[-1] if part else key) for column in result["published"].values()]
            _add_row(table, before + title, form, [each.get(key) for each in found], published if key == "acc1" else [])
    return table


def _add_row(table: Table, title: str, form: str, ours: list[Any], published: list[Any]) -> None:
    if any(value is not None for value in ours + published):
        shown = ["" if value is None else form.format(value) for value in ours]
        table.add_row(title, *shown, *("" if value is None else f"{value} %" for value in published))


def _threshold_table(scores: Scores) -> Table:
    """What remains of the raw weights' answers if those below a probability are "don't know"."""
    shown = [row for row in scores["thresholds"] if row["threshold"]]
    table = Table("answer from a probability of", *(f"{row['threshold']:g}" for row in shown))
    for title, key in (("images answered, %", "coverage"), ("of these right, %", "accuracy")):
        table.add_row(title, *("" if row[key] is None else f"{row[key]:.1f}" for row in shown))
    return table


def _corruption_table(name: str, scores: Scores) -> Table:
    """The raw weights' top-1 by corruption and severity."""
    found = scores["corruptions"]
    severities = sorted({severity for values in found.values() for severity in values})
    table = Table(f"{name}: top-1, % at severity", *severities, "mean")
    for corruption, values in sorted(found.items(), key=lambda each: [*ALEXNET, each[0]].index(each[0])):
        cells = [f"{values[severity]:.1f}" if severity in values else "" for severity in severities]
        table.add_row(corruption, *cells, f"{sum(values.values()) / len(values):.1f}")
    return table
