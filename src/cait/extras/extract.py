"""The features that a network has of images: what its head sees of them in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from cait import cores
from cait.data.dataset import EvalImages, Samples
from cait.data.reading import UnreadableImages
from cait.errors import UserError
from cait.model.weights import classifiers

BATCH = 64
SIDE = 64
"""Larger images are averaged down to this many pixels a side before their pixels are kept."""


class Extracted(NamedTuple):
    """The images of a set that can be read."""

    features: np.ndarray
    """float32 [N, D]."""
    labels: np.ndarray
    """int64 [N], as the samples have them; -1 without a class."""
    kept: np.ndarray
    """int64 [N], the indices of the images among the samples."""
    pixels: np.ndarray
    """uint8 [N, 3, S, S], S at most SIDE; float32 if the transform is one's own; S is 0 if not asked for."""

    def at(self, places: np.ndarray) -> Extracted:
        """The images at which a mask [N] is True."""
        return Extracted(*(column[places] for column in self))


def extract(
    network: nn.Module,
    samples: Samples,
    data: Any,
    device: torch.device,
    chosen: Sequence[int] | None = None,
    pixels: bool = False,
    head: nn.Module | None = None,
) -> Extracted:
    """Read images once, under the evaluation transform of a data module, and take their features.

    Raises UserError if the network has no classifier, does not call it, or gives features that are not finite.

    Args:
        network: is put on the device and into evaluation, and left as it was.
        chosen: the indices of the images to read; None reads all.
        head: the layer whose inputs are the features; None takes the first of `classifiers`.
    """
    unreadable = UnreadableImages(None, len(samples))
    images = EvalImages(samples, data.eval_transform, unreadable, data.preprocessing.reading)
    chosen = range(len(samples)) if chosen is None else chosen
    modes, home = [(part, part.training) for part in network.modules()], next(network.parameters()).device
    network.to(device).eval()
    columns = []
    try:
        with ThreadPoolExecutor(cores.share(1)) as pool:
            for start in range(0, len(chosen), BATCH):
                batch, labels = default_collate([*pool.map(images.__getitem__, chosen[start : start + BATCH])])
                kept = _small(batch) if pixels else np.zeros((len(batch), 3, 0, 0))
                batch = batch.to(device)
                seen = data.normalize_and_erase(batch) if batch.dtype == torch.uint8 else batch
                columns.append((inputs(network, head, seen), labels.numpy(), kept))
    finally:
        network.to(home)
        for part, training in modes:
            part.training = training
    features, marks, planes = map(np.concatenate, zip(*columns, strict=True))
    if not np.isfinite(features).all():
        raise UserError("the network has features that are not finite")
    readable = np.array([samples.name(index) not in unreadable.seen for index in chosen])
    return Extracted(features, marks, np.array(chosen), planes).at(readable)


@torch.inference_mode()
def inputs(network: nn.Module, head: nn.Module | None, images: Tensor) -> np.ndarray:
    """What the head sees of images [B, 3, S, S]: float32 [B, D], a mean over tokens or places if it sees several."""
    seen: list[Tensor] = []
    for layer in [head] if head else classifiers(network)[:1]:
        hook = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            network(images.to(next(network.parameters()).dtype))
        finally:
            hook.remove()
    if not seen:
        raise UserError(
            "the features are what the classifier sees, and the network calls none: give it get_classifier()"
        )
    features = seen[-1].movedim(1, -1) if isinstance(layer, nn.Conv2d) else seen[-1]
    return features.reshape(len(features), -1, features.shape[-1]).mean(1).float().cpu().numpy()


def _small(batch: Tensor) -> np.ndarray:
    """Images uint8 [B, S, S, 3] or float32 [B, 3, S, S], channels first and averaged down to SIDE."""
    planes = batch.permute(0, 3, 1, 2) if batch.dtype == torch.uint8 else batch
    if planes.shape[-1] > SIDE:
        planes = nn.functional.adaptive_avg_pool2d(planes.float(), SIDE).to(batch.dtype)
    return planes.numpy()


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` numbers, evenly over them."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]
