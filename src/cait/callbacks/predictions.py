"""Predictions as a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cait.datamodule import ImageNetDataModule
from cait.errors import UserError


class PredictionsFile(Callback):
    """Write one row for each image, in order: path, class, probability.

    Each of several processes writes its own file, with its rank in the name.
    """

    def __init__(self, path: Path, data: ImageNetDataModule) -> None:
        self.path, self.data = path, data

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            self.path = self.path.with_stem(f"{self.path.stem}-{trainer.global_rank}")
        self._names = self.data.class_names
        samples = self.data.predict_samples
        self._paths = [samples.name(i) for i in range(trainer.global_rank, len(samples), trainer.world_size)]
        self._done = 0
        try:
            self._file = self.path.open("x", newline="")
        except FileExistsError as error:
            raise UserError(f"{self.path} exists; move it away or name another file with --output") from error
        self._writer = csv.writer(self._file)
        self._writer.writerow(["path", "class", "probability"])

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        probabilities, classes = outputs.max(dim=1)
        paths = self._paths[self._done : self._done + len(outputs)]
        self._done += len(outputs)
        for path, label, probability in zip(paths, classes.tolist(), probabilities.tolist(), strict=True):
            self._writer.writerow([path, self._names[label], f"{probability:.4f}"])

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file.close()
        print(f"{self._done} predictions in {self.path}")
