"""One of two processes that train the same with DDP and with FSDP2: test_fsdp.py starts both."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import timm.optim.muon
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from modules import FIELDS, module, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from cait.errors import UserError
from cait.guards.nonfinite import NonFiniteGuard
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.train.callbacks import EMA, StepSeed
from contrib.fsdp.strategy import FullyShardedStrategy

RANK = int(os.environ["LOCAL_RANK"])
BATCHES = 25
MUON = timm.optim.muon
MUON.zeropower_via_newtonschulz = partial(MUON.zeropower_via_newtonschulz, dtype=torch.float32)
"""In bfloat16, timm's choice, rounding would hide a difference."""


class Losses(Callback):
    """Of every step on this process; infinity and NaN too."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def loader() -> DataLoader:
    """The same batches in every epoch; one has a NaN, on process 1 alone."""
    torch.manual_seed(0)
    images, labels = torch.randn(4 * BATCHES, 3, 8, 8), torch.randint(0, 7, (4 * BATCHES,))
    images[21, 0, 0, 0] = float("nan")
    return DataLoader(
        Subset(TensorDataset(images, labels), range(RANK, len(images), 2)), batch_size=2
    )


def fit(
    name: str, strategy: str, settings: dict, trainers: dict, start: str | None = None
) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    fields = FIELDS | {"depth": 1} | settings.get("fields", {})
    net = module(lr=1e-2, warmup_epochs=0, drop_path_rate=0.2, **(settings | {"fields": fields}))
    losses = Losses()
    fitted = trainer(
        strategy=FullyShardedStrategy() if strategy == "fsdp2" else strategy,
        devices=2,
        use_distributed_sampler=False,
        plugins=[DurableCheckpointIO()],
        callbacks=[
            LastCheckpoint(Path(name)),
            StepSeed(0),
            EMA(0.9),
            NonFiniteGuard(Path(name), 5),
            losses,
        ],
        **({"gradient_clip_val": 0.5} | trainers),
    )
    fitted.fit(net, loader(), ckpt_path=start)
    groups = fitted.optimizers[0].param_groups
    decay = {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}
    return {
        "losses": losses.found,
        "decay": {key: decay[id(weight)] for key, weight in net.model.named_parameters()},
    }


class Tied(nn.Module):
    """It uses the weights of a block, and not the block."""

    def __init__(self, num_classes: int, **_: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3 * 8 * 8, num_classes, bias=False)])

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(images.flatten(1), self.layers[0].weight)


class Scaled(Tied):
    """It has a parameter without a dimension."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = nn.Parameter(torch.tensor(1.0))


REFUSED = {
    "tied": dict(name="fsdp_pair:Tied"),
    "scaled": dict(name="fsdp_pair:Scaled"),
    "adafactor": dict(optimizer="adafactor", fields=dict(embed_dim=64)),
    "adamuon": dict(optimizer="adamuon"),
}


def refusals() -> dict[str, str]:
    """What is said of each of REFUSED, and of a process that has a batch more than the other."""
    said = {}
    for name, settings in REFUSED.items():
        try:
            fit(name, "fsdp2", settings, {})
        except UserError as error:
            said[name] = str(error)
    strategy = FullyShardedStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    try:
        strategy.process_dataloader(range(3 + RANK))
    except UserError as error:
        said["uneven"] = str(error)
    return said


if __name__ == "__main__":
    settings, trainers = map(json.loads, sys.argv[1:])
    torch.set_num_threads(1)
    found = {
        "ddp": fit("ddp", "ddp", settings, trainers),
        "fsdp": fit("fsdp", "fsdp2", settings, trainers),
        "fsdp-again": fit("fsdp-again", "fsdp2", settings, trainers, "fsdp/previous.ckpt"),
        "ddp-to-fsdp": fit("ddp-to-fsdp", "fsdp2", settings, trainers, "ddp/previous.ckpt"),
        "fsdp-to-ddp": fit("fsdp-to-ddp", "ddp", settings, trainers, "fsdp/previous.ckpt"),
    }
    if not settings and not trainers:
        found["refusals"] = refusals()
    Path(f"{RANK}.json").write_text(json.dumps(found))
