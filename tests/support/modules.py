"""Small modules, loaders, data modules and trainers for tests without the command line."""

from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import MixedPrecision
from timm.optim import Lamb
from torch.utils.data import DataLoader, TensorDataset

from cait.data.datamodule import ImageNetDataModule
from cait.train.module import CaiTModule
from cait.train.optim import param_groups

FIELDS = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4)


def module(kind=CaiTModule, /, **settings):
    """A module, or one of a subclass."""
    defaults = dict(img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    return kind(**(defaults | settings))


def loader(count=24, batch=4, img_size=8):
    torch.manual_seed(0)
    images = torch.randn(count, 3, img_size, img_size)
    return DataLoader(TensorDataset(images, torch.randint(0, 7, (count,))), batch_size=batch)


def images_in(root, **settings):
    return ImageNetDataModule(
        str(root), **(dict(img_size=32, batch_size=4, num_workers=0) | settings)
    )


def trainer(kind=Trainer, /, **settings):
    quiet = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        max_epochs=2,
    )
    return kind(**(quiet | settings))


def train(net, path=None, images=None, **settings):
    """Train for an epoch, or as the settings say, validate, and save at `path`."""
    fit = trainer(**{"max_epochs": 1} | settings)
    if isinstance(images, ImageNetDataModule):
        fit.fit(net, images)
    else:
        images = loader() if images is None else images
        fit.fit(net, images, images)
    if path:
        fit.save_checkpoint(path)
    return fit


class SavesAt(Checkpoint):
    """Saves amid an epoch, after a step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Chosen(CaiTModule):
    """The module with another optimizer than its own fused AdamW."""

    def __init__(self, optimizer, **settings):
        super().__init__(**settings)
        self.chosen = optimizer

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        if self.chosen == "fused AdamW":
            return configured
        kinds = {
            "AdamW": torch.optim.AdamW,
            "SGD": partial(torch.optim.SGD, momentum=0.9),
            "Lamb": Lamb,
        }
        return kinds[self.chosen](param_groups(self.model, 0.05), lr=1e-2)


def precision_of(name):
    """The trainer's setting; Lightning has 16-mixed on a CPU as a plugin alone."""
    return (
        dict(plugins=[MixedPrecision("16-mixed", "cpu")])
        if name == "16-mixed"
        else dict(precision=name)
    )
