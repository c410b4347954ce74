"""What two processes train with DDP and with FSDP2, and what FSDP2 refuses: tests/support/gloo.py runs both."""

import json
import os
from functools import partial
from pathlib import Path

import timm.optim.muon
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from modules import FIELDS, module, trainer
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from cait.guards.nonfinite import NonFiniteGuard
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import EMA, StepSeed
from contrib.fsdp.strategy import FullyShardedStrategy

torch.set_num_threads(1)
RANK = int(os.environ["LOCAL_RANK"])
BATCHES = 25
MUON = timm.optim.muon
MUON.zeropower_via_newtonschulz = partial(MUON.zeropower_via_newtonschulz, dtype=torch.float32)
"""In bfloat16, timm's choice, rounding would hide a difference."""


def loader():
    """The same batches in every epoch; one has a NaN, on process 1 alone."""
    torch.manual_seed(0)
    images = torch.randn(4 * BATCHES, 3, 8, 8)
    images[21, 0, 0, 0] = float("nan")
    dataset = TensorDataset(images, torch.randint(0, 7, (4 * BATCHES,)))
    return DataLoader(Subset(dataset, range(RANK, len(images), 2)), batch_size=2)


def fit(strategy, start, settings, trainers, rank, folder):
    """Train two epochs, or the second; the losses."""
    seed_everything(0, verbose=False)
    fields = FIELDS | {"depth": 1} | settings.get("fields", {})
    recipe = dict(lr=1e-2, warmup_epochs=0, drop_path_rate=0.2) | settings
    losses = []  # of every step on this process; infinity and NaN too

    def note(trainer, module, outputs, *_):
        losses.append(float(outputs["loss"]))

    last = LastCheckpoint(folder)
    both = trainer(
        strategy=FullyShardedStrategy() if strategy == "fsdp2" else strategy,
        devices=2,
        use_distributed_sampler=False,
        plugins=[DurableCheckpointIO()],
        callbacks=[
            last,
            StepSeed(0),
            EMA(0.9),
            NonFiniteGuard(folder, 5),
            LambdaCallback(on_train_batch_end=note),
        ],
        **{"gradient_clip_val": 0.5} | trainers,
    )
    both.fit(module(**recipe | {"fields": fields}), loader(), ckpt_path=start)
    return losses


class Tied(nn.Module):
    """It uses the weights of a block, and not the block."""

    def __init__(self, num_classes, **_):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3 * 8 * 8, num_classes, bias=False)])

    def forward(self, images):
        return nn.functional.linear(images.flatten(1), self.layers[0].weight)


class Scaled(Tied):
    """It has a parameter without a dimension."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.tensor(1.0))


def uneven(rank, folder):
    """A process that has a batch more than the other."""
    strategy = FullyShardedStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.process_dataloader(range(3 + rank))


ASKED = json.loads(Path("settings.json").read_text())
"""Settings of the module and of the trainer."""
REFUSED = {
    "tied": dict(name="fsdp_pair:Tied"),
    "scaled": dict(name="fsdp_pair:Scaled"),
    "adafactor": dict(optimizer="adafactor", fields=dict(embed_dim=64)),
    "adamuon": dict(optimizer="adamuon"),
}
SITUATIONS = {
    "ddp": partial(fit, "ddp", None, *ASKED),
    "fsdp": partial(fit, "fsdp2", None, *ASKED),
    "fsdp-again": partial(fit, "fsdp2", "fsdp/previous.ckpt", *ASKED),
    "ddp-to-fsdp": partial(fit, "fsdp2", "ddp/previous.ckpt", *ASKED),
    "fsdp-to-ddp": partial(fit, "ddp", "fsdp/previous.ckpt", *ASKED),
    "uneven": uneven,
} | {name: partial(fit, "fsdp2", None, settings, {}) for name, settings in REFUSED.items()}
