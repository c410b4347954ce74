"""What `cait eval` and `cait validate` find out beyond loss and accuracy, as a table and a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from rich.table import Table
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from cait.callbacks.ema import EMA
from cait.data.real_labels import is_imagenet, real_labels
from cait.datamodule import ImageNetDataModule
from cait.errors import UserError

Figures = dict[str, Any]
CLASSES_IN_JSON = 1000
"""Up to so many classes the JSON file holds the confusion matrix itself, 3 MB of it."""


class RealAccuracy(Metric):
    """Top-1 and top-5 in per cent where several classes may be right; a picture without any is not counted."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Pictures, and those of them that are right at once and among five; as integers, so that the sums are exact.
        self.add_state("counts", torch.zeros(3, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes], right classes [B, L], filled up with -1."""
        best = logits.topk(min(5, logits.shape[1])).indices
        hits = (best[:, :, None] == labels[:, None, :]).any(dim=2)  # [B, 5]
        self.counts += torch.stack([(labels >= 0).any(dim=1).sum(), hits[:, 0].sum(), hits.any(dim=1).sum()])

    def compute(self) -> Figures:
        images, *right = self.counts.tolist()
        acc1, acc5 = (100 * count / images if images else None for count in right)
        return {"acc1": acc1, "acc5": acc5, "images": images}


class Confusion(Metric):
    """The confusion matrix as the list of its counts: C² of them would be 3.5 GB for 21,000 classes."""

    cells: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("cells", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Note the cell of each image: logits [B, num_classes], labels [B]; those below 0 are not counted."""
        cells = labels * self.num_classes + logits.argmax(dim=1)
        self.cells.append(cells.where(labels >= 0, -1))  # to leave them out now would wait for the device

    def compute(self) -> np.ndarray:
        """Rows of true class, predicted class and images, [K, 3], in the order of the classes."""
        cells, images = dim_zero_cat(self.cells).unique(return_counts=True)
        table = torch.stack([cells // self.num_classes, cells % self.num_classes, images], dim=1)
        return table[cells >= 0].cpu().numpy()


class Counts(nn.Module):
    """What is counted of one set of weights, exactly over several processes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.confusion = Confusion(num_classes)
        self.real = RealAccuracy()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], not counted below 0, and ReaL's [B, L]."""
        self.confusion.update(logits, labels)
        if real is not None:
            self.real.update(logits, real.where(labels[:, None] >= 0, -1))

    def compute(self, class_names: list[str], with_real: bool) -> Figures:
        confusion = self.confusion.compute()
        true, predicted, images = confusion.T
        of_class, right = (
            np.bincount(true[part], images[part], len(class_names)) for part in (slice(None), true == predicted)
        )
        figures: Figures = {
            "images": int(images.sum()),
            # A class without an image has no accuracy.
            "per_class": {
                name: 100 * hits / count if count else None
                for name, hits, count in zip(class_names, right.tolist(), of_class.tolist(), strict=True)
            },
            "confusion": confusion,
        }
        if len(class_names) <= CLASSES_IN_JSON:
            matrix = np.zeros((len(class_names),) * 2, np.int64)
            matrix[true, predicted] = images
            figures["confusion"] = matrix.tolist()
        return figures | ({"real": self.real.compute()} if with_real else {})


class Evaluation(Callback):
    """Count, in each validation, the raw weights' predictions and beside them those of the moving average.

    It must stand behind `EMA` among the callbacks, for it takes the average's logits from there. After a
    validation `figures` has, under "raw" and "ema" (where there is an average): `acc1` and `acc5` in per cent,
    `loss`, `images` that were counted, `per_class` (accuracy in per cent by name), `confusion` (a row a true
    class, a column a predicted one; above CLASSES_IN_JSON classes an array as `Confusion` gives it), and on the
    validation set of `data`, where its ReaL labels are known, `real` with `acc1`, `acc5` and `images`.

    Args:
        data: the data.
        real: file of ReaL labels; None takes timm's copy where the data is ImageNet.
    """

    def __init__(self, data: ImageNetDataModule, real: str | None) -> None:
        self.data, self.real = data, real
        self.figures: dict[str, Figures] = {}

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        loader: Any = trainer.val_dataloaders
        self._order, self._done = loader.sampler.indices, 0  # which pictures this process sees, in order
        self._real = self._real_labels() if loader.dataset is self.data.val_images else None
        self._ema: Any = next((callback for callback in trainer.callbacks if isinstance(callback, EMA)), None)  # type: ignore[attr-defined]
        weights = ("raw", "ema") if self._ema and self._ema.average is not None else ("raw",)
        self._counts = {name: Counts(pl_module.num_classes).to(pl_module.device) for name in weights}

    def _real_labels(self) -> Tensor | None:
        names = self.data.class_names
        if self.real is None and not is_imagenet(names):
            return None
        try:
            return real_labels(self.real, self.data.val_images.samples, len(names))
        except UserError as error:
            if self.real is not None:
                raise
            rank_zero_info(f"ReaL is not scored: {error}")  # a part of ImageNet, or under other names
            return None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        labels = batch[1]
        pictures = list(self._order[self._done : self._done + len(labels)])
        self._done += len(labels)
        real = None if self._real is None else self._real[pictures].to(labels.device)
        for name, counts in self._counts.items():
            counts.update(outputs if name == "raw" else self._ema.logits, labels, real)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.figures = {}
        for name, counts in self._counts.items():
            prefix = "val" if name == "raw" else "val_ema"
            logged = {figure: _number(metrics[f"{prefix}/{figure}"]) for figure in ("acc1", "acc5", "loss")}
            self.figures[name] = logged | counts.compute(self.data.class_names, self._real is not None)


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON knows no others


def check_place(path: Path) -> None:
    """Make the folder of `path`, before the work whose outcome it is to hold.

    Raises:
        UserError: `path` is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file with --output")


def write(result: Figures, path: Path) -> None:
    """Write `result` as JSON, each file whole or not at all.

    An array goes into a file of its own beside `path`, named after its place in `result`, as
    evaluation-raw-confusion.npy; the JSON has that name in its place.
    """
    result = _arrays_out(result, path.with_suffix(""))
    with _whole(path) as scratch:
        scratch.write_text(json.dumps(result, ensure_ascii=False) + "\n")


def _arrays_out(result: Figures, stem: Path) -> Figures:
    """`result` with the names of files in place of its arrays."""
    result = result.copy()
    for key, value in result.items():
        file = stem.with_name(f"{stem.name}-{key}.npy")
        if isinstance(value, dict):
            result[key] = _arrays_out(value, stem.with_name(f"{stem.name}-{key}"))
        elif isinstance(value, np.ndarray):
            with _whole(file) as scratch, scratch.open("wb") as out:
                np.save(out, value)
            result[key] = file.name
    return result


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`."""
    scratch = path.with_name(f".{path.name}.tmp")
    yield scratch
    scratch.replace(path)


def as_table(result: Figures) -> Table:
    """The figures of the raw weights and of their average beside those that were published."""
    ours = {name: result[key] for key, name in (("raw", "raw"), ("ema", "EMA")) if key in result}
    table = Table("")
    for name in (*ours, *result["published"]):
        table.add_column(name, justify="right")
    for title, form, key, part in (
        ("top-1", "{:.2f} %", "acc1", None),
        ("top-5", "{:.2f} %", "acc5", None),
        ("loss", "{:.4f}", "loss", None),
        ("images", "{:,}", "images", None),
        ("ReaL top-1", "{:.2f} %", "acc1", "real"),
        ("ReaL top-5", "{:.2f} %", "acc5", "real"),
        ("ReaL images", "{:,}", "images", "real"),
        ("V2 top-1", "{:.2f} %", "acc1", "v2"),
        ("V2 top-5", "{:.2f} %", "acc5", "v2"),
        ("V2 images", "{:,}", "images", "v2"),
    ):
        figures = [(column.get(part, {}) if part else column).get(key) for column in ours.values()]
        # Published are top-1, called after the set where it is not the validation set.
        published = [column.get(part or key) if key == "acc1" else None for column in result["published"].values()]
        if any(figure is not None for figure in figures + published):
            shown = ["" if figure is None else form.format(figure) for figure in figures]
            table.add_row(title, *shown, *("" if figure is None else f"{figure} %" for figure in published))
    return table
