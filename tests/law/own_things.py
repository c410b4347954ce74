"""A network, a data set, a metric and callbacks as users write them, in a file beside their runs."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics.classification import MulticlassRecall, MultilabelRecall


class Net(nn.Module):
    def __init__(self, img_size, num_classes, in_chans=3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8 * ((img_size - 1) // 2) ** 2, num_classes)

    def forward(self, images):
        if self.training:  # the dropout draws from torch
            images = images * (random.random() + np.random.random())
        return self.head(self.dropout(self.body(images)))


class Pictures(torch.utils.data.Dataset):
    """The pictures below pictures/<split>/<class>; one of validation has no class."""

    def __init__(self, split):
        folder = Path("pictures", split)
        self.classes = sorted(path.name for path in folder.iterdir())
        self.items = [
            (str(path), self.classes.index(path.parent.name))
            for path in sorted(folder.glob("*/*.*"))
        ]
        if split == "val":
            self.items[1] = (self.items[1][0], -1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def recall(num_classes=None, num_labels=None):
    return (
        MultilabelRecall(num_labels)
        if num_labels
        else MulticlassRecall(num_classes, average="micro")
    )


class Seen(Callback):
    """Writes what a run trains and validates on into seen.json of its folder."""

    def on_train_start(self, trainer, pl_module):
        data = trainer.datamodule
        names = data.label_names
        weights = getattr(pl_module.loss, "weights", None)
        found = {"processes": trainer.world_size, "classes": data.class_names}
        found["weights"] = None if weights is None else weights.tolist()
        for part in ("train", "val"):
            samples = getattr(data.source, part)
            items = [samples[index] for index in range(len(samples))]
            found[part] = [
                (str(image), names[label] if label >= 0 else None) for image, label in items
            ]
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "seen.json").write_text(json.dumps(found))


class LeavesOnce(Callback):
    """Ends a run before its third step without saving anything, as a kill does; never a second time."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.strategy.barrier()
            left = Path(trainer.default_root_dir, "left")
            was = left.exists()
            trainer.strategy.barrier()
            if not was:
                left.touch()
                raise SystemExit(137)


def planes(image, reading):
    return torch.full((reading.in_chans, 8, 8), (reading.reader_args or {}).get("x", 0.25))
