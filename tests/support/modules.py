"""Small modules, loaders and trainers for tests without the command line."""

from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from timm.optim import Lamb
from torch.utils.data import DataLoader, TensorDataset

from cait.train.module import CaiTModule
from cait.train.optim import param_groups

FIELDS = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4)


def module(**settings: object) -> CaiTModule:
    defaults: dict = dict(img_size=8, num_classes=7, fields=FIELDS, lr_base_size=None)
    return CaiTModule(**(defaults | settings))


def loader(count: int = 24, batch: int = 4, img_size: int = 8) -> DataLoader:
    torch.manual_seed(0)
    images = torch.randn(count, 3, img_size, img_size)
    return DataLoader(TensorDataset(images, torch.randint(0, 7, (count,))), batch_size=batch)


def trainer(**settings: object) -> Trainer:
    quiet: dict = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        max_epochs=2,
    )
    return Trainer(**(quiet | settings))


class Chosen(CaiTModule):
    """The module with another optimizer than its own fused AdamW."""

    def __init__(self, optimizer: str, **settings: object) -> None:
        super().__init__(**settings)
        self.chosen = optimizer

    def configure_optimizers(self) -> object:
        configured = super().configure_optimizers()
        if self.chosen == "fused AdamW":
            return configured
        kinds = {"AdamW": torch.optim.AdamW, "SGD": partial(torch.optim.SGD, momentum=0.9), "Lamb": Lamb}
        return kinds[self.chosen](param_groups(self.model, 0.05), lr=1e-2)


def precision_of(name: str) -> dict:
    """The trainer's setting; Lightning has 16-mixed on a CPU as a plugin alone."""
    return dict(plugins=[MixedPrecision("16-mixed", "cpu")]) if name == "16-mixed" else dict(precision=name)
