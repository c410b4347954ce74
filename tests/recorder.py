"""What a training run really saw, written down step by step; given to runs as a callback."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class Recorder(Callback):
    """One JSON line a batch and process in `<folder>/<rank>.jsonl`: step, digest of each picture, loss."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        images, targets = batch
        seen = [hashlib.sha1(image.numpy().tobytes()).hexdigest()[:10] for image in images]
        line = dict(step=trainer.global_step, batch=i, seen=seen, targets=targets.tolist(), loss=float(outputs["loss"]))
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
