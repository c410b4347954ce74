"""Predictions as a CSV file."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cait import disk
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import Samples
from cait.data.reading import UnreadableImageError, load_rgb
from cait.errors import UserError


class PredictionsFile(Callback):
    """Write one row for each image, in order: path, class, probability. The file appears when it is whole.

    Class and probability of an image that cannot be read stay empty; the reason goes to standard error. Each of
    several processes writes its own file, with its rank in the name.

    Raises:
        UserError: there is such a file already, or none of the images can be read.
    """

    def __init__(self, path: Path, data: ImageNetDataModule) -> None:
        self.path, self.data = path, data

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            self.path = self.path.with_stem(f"{self.path.stem}-{trainer.global_rank}")
        if self.path.exists():
            raise UserError(f"{self.path} exists; move it away or name another file with --output")
        self._names = self.data.class_names
        self._samples = self.data.predict_samples
        self._indices = range(trainer.global_rank, len(self._samples), trainer.world_size)
        self._done = self._unreadable = 0
        self._file = disk.scratch(self.path).open("w", **disk.TABLE)
        self._writer = csv.writer(self._file)
        self._writer.writerow(["path", "class", "probability"])

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        probabilities, classes = outputs.max(dim=1)
        indices = self._indices[self._done : self._done + len(outputs)]
        self._done += len(outputs)
        columns = indices, batch[1].tolist(), classes.tolist(), probabilities.tolist()
        for index, readable, label, probability in zip(*columns, strict=True):
            path = self._samples.name(index)
            if readable < 0:
                self._unreadable += 1
                print(f"cannot read {path!r}: {why_unreadable(self._samples, index)}", file=sys.stderr)
                self._writer.writerow([path, "", ""])
            else:
                self._writer.writerow([path, self._names[label], f"{probability:.4f}"])

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file.close()
        disk.scratch(self.path).replace(self.path)
        print(f"{self._done - self._unreadable} predictions in {self.path}")
        if trainer.world_size == 1 and self._unreadable == self._done:
            raise UserError(f"none of the {self._done:,} images can be read")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        disk.remove(disk.scratch(self.path))


def why_unreadable(samples: Samples, index: int) -> str:
    """Why an image cannot be read. Loader processes tell only that it cannot, so it is read once more."""
    name = samples.name(index)
    try:
        load_rgb(samples[index][0], name)
    except UnreadableImageError as error:
        return str(error).removeprefix(f"cannot read the image {name}: ")
    return "it could not be read at first"
