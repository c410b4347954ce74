"""A network, a data set, a metric and callbacks as users write them, in a file beside their runs."""

import json
import random
from pathlib import Path

import numpy as np
import own_parts
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics.classification import MulticlassRecall, MultilabelRecall


class Net(own_parts.Net):
    """It draws from each generator: torch's in its dropout."""

    def __init__(self, img_size, num_classes, in_chans=3):
        super().__init__(img_size, num_classes, width=8)
        self.body[0] = nn.Conv2d(in_chans, 8, 3, stride=2)

    def forward(self, images):
        if self.training:
            images = images * (random.random() + np.random.random())
        return super().forward(images)


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
        names = {-1: None, **dict(enumerate(data.label_names))}
        weights = getattr(pl_module.loss, "weights", None)
        found = {"processes": trainer.world_size, "classes": data.class_names}
        found["weights"] = [] if weights is None else weights.tolist()
        for part in ("train", "val"):
            samples = getattr(data.source, part)
            items = [samples[index] for index in range(len(samples))]
            found[part] = [(str(image), names[label]) for image, label in items]
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "seen.json").write_text(json.dumps(found))


def planes(image, reading):
    return torch.full((reading.in_chans, 8, 8), (reading.reader_args or {}).get("x", 0.25))
