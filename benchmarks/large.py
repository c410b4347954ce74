"""Count what a large run keeps, reads and looks up, on a CPU: `python benchmarks/large.py`.

Prints the GB of tensors that a training step saves for its backward pass, per image and apart from the images, in bf16;
the share of the entries of a node's batches that are distinct images; and how often a process looks up a path and lists
a folder before it trains. The first is linear in depth and batch, so four small networks give it for the whole one.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cait
from cait.data.folder import FolderSource, Splits
from cait.data.loader import TrainBatchSampler

MODELS = {"xxs24": (224, 24), "s24": (224, 24), "m36": (384, 36), "m48": (448, 48)}
"""Size of the images, and blocks."""
CLASSES, IMAGES = 1000, 1_281_167


def saved(name: str, size: int, depth: int, batch: int, **settings: Any) -> int:
    """Bytes that the backward pass finds, without the weights themselves. Shared memory counts once."""
    checkpointing = settings.pop("grad_checkpointing", False)
    model = cait.create_model(name, img_size=size, num_classes=CLASSES, drop_path_rate=0.0, depth=depth, **settings)
    model.grad_checkpointing = checkpointing
    weights, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that its address stays its own
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(torch.randn(batch, 3, size, size)).logsumexp(dim=1).sum()
    total = sum(tensor.untyped_storage().nbytes() for at, tensor in found.items() if at not in weights)
    loss.backward()
    return total


def memory() -> None:
    for name, (size, depth) in MODELS.items():
        for settings in ({}, {"grad_checkpointing": True}, {"attention_backend": "reference"}):
            few = {(d, b): saved(name, size, d, b, **settings) for d in (1, 2) for b in (1, 2)}
            image = {d: few[d, 2] - few[d, 1] for d in (1, 2)}
            fixed = {d: few[d, 1] - image[d] for d in (1, 2)}
            each, apart = (part[1] + (depth - 1) * (part[2] - part[1]) for part in (image, fixed))
            print(f"{name} @{size} {settings or ''}: {each / 1e9:.3f} GB per image, {apart / 1e9:.2f} GB apart")


def distinct(world: int) -> float:
    """Images over entries in the batches of the first node of `world` processes."""
    images, entries = set[int](), 0
    for rank in range(8):
        for _, keys in zip(range(40), TrainBatchSampler(IMAGES, 16, 0, 3, rank, world), strict=False):
            images |= {index for _, index, _ in keys}
            entries += len(keys)
    return len(images) / entries


def looked_up(root: Path) -> dict[str, int]:
    """What a process asks the file system until it has the list of the images."""
    for folder in (root / split / f"n{label:08}" for split in ("train", "val") for label in range(CLASSES)):
        folder.mkdir(parents=True)
        (folder / "0.JPEG").touch()
    counts, stat = collections.Counter[str](), os.stat
    sys.addaudithook(lambda event, _: counts.update([event]) if event == "os.scandir" else None)
    os.stat = lambda *path, **how: (counts.update(["os.stat"]), stat(*path, **how))[1]
    source = FolderSource(Splits(root=str(root)))
    assert len(source.class_names) == len(source.train)
    return dict(counts)


if __name__ == "__main__":
    memory()
    print("distinct images over entries: one node", f"{distinct(8):.3f}, eight nodes {distinct(64):.3f}")
    with tempfile.TemporaryDirectory() as folder:
        print("a process that lists ImageNet's 2,000 folders:", looked_up(Path(folder)))
