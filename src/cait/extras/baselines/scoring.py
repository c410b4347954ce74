"""What is scored beside a network: chance, logistic regression on the pixels, nearest neighbours of its features."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cait import cores
from cait.data.dataset import NO_LABEL, EvalImages, Samples
from cait.data.reading import UnreadableImages
from cait.extras import probes
from cait.extras.probes import accuracies, evenly, inputs, last_linear

MOST = 10_000
"""Images that are read of each set."""
BATCH = 128
SIDE = 64
"""Larger images are averaged down to this many pixels a side for the regression."""


@dataclass
class Images:
    """What is kept of a set's images.

    Args:
        pixels: [N, P], at most SIDE × SIDE × 3 of each: uint8, or float32 if the transform is one's own.
        labels: [N].
        features: float32 [N, D], the input of the network's head.
    """

    pixels: np.ndarray
    labels: np.ndarray
    features: np.ndarray | None = None


def read(samples: Samples, data: Any, network: nn.Module | None, device: torch.device, most: int = MOST) -> Images:
    """The images of a set under the evaluation transform, with their features if a network is given.

    Images that cannot be read or have no label are left out.
    """
    unreadable = UnreadableImages(None, len(samples))
    images = EvalImages(samples, data.eval_transform, unreadable, data.preprocessing.reading)
    pixels, labels, features = [], [], []
    head = last_linear(network, data.num_classes) if network else None
    with ThreadPoolExecutor(cores.share(1)) as pool:
        indices = evenly(len(samples), most)
        for start in range(0, len(indices), BATCH):
            items = pool.map(images.__getitem__, indices[start : start + BATCH])
            loaded = [item for item in items if item[1] != NO_LABEL]
            if not loaded:
                continue
            batch = torch.stack([image for image, _ in loaded])
            labels += [label for _, label in loaded]
            pixels.append(small(batch))
            if network and head:
                batch = batch.to(device)
                seen = data.normalize_and_erase(batch) if batch.dtype == torch.uint8 else batch
                features.append(inputs(network, head, seen))
    return Images(
        np.concatenate(pixels) if pixels else np.zeros((0, 0), np.float32),
        np.array(labels, int),
        np.concatenate(features) if features else None,
    )


def small(batch: Tensor) -> np.ndarray:
    """Pixels [B, P] of images uint8 [B, S, S, 3] or float32 [B, 3, S, S], channels first, averaged down to SIDE."""
    planes = batch.permute(0, 3, 1, 2) if batch.dtype == torch.uint8 else batch
    if planes.shape[-1] > SIDE:
        planes = nn.functional.adaptive_avg_pool2d(planes.float(), SIDE).to(batch.dtype)
    return planes.flatten(1).numpy()


def chance(train: Images, val: Images, classes: int) -> tuple[np.ndarray, str]:
    """Answer the class that most training images have."""
    most = np.bincount(train.labels, minlength=classes).argmax()
    return np.full(len(val.labels), most), "always the class with the most training images"


def regression(
    train: Images, val: Images, classes: int, work: float = probes.WORK, iterations: int = probes.ITERATIONS
) -> tuple[np.ndarray, str]:
    """scikit-learn's logistic regression on standardised pixels; of grey images one channel."""
    pixels, val_pixels = grey(train.pixels, val.pixels)
    answers, kept = probes.regression(pixels, val_pixels, train.labels, classes, work, iterations)
    return answers, f"scikit-learn, on the pixels{probes.of_all(kept, len(train.labels))}"


def grey(*sets: np.ndarray) -> Iterator[np.ndarray]:
    """One of the three channels if they are the same in all images."""
    channels = [pixels.reshape(len(pixels), 3, -1) for pixels in sets]
    same = all(np.array_equal(planes[:, :1].repeat(3, axis=1), planes) for planes in channels)
    return (planes[:, 0] if same else planes.reshape(len(planes), -1) for planes in channels)


def neighbours(train: Images, val: Images, classes: int) -> tuple[np.ndarray, str]:
    """The nearest training images by the cosine of their features; see `cait.extras.probes.neighbours`."""
    assert train.features is not None
    assert val.features is not None
    answers, k = probes.neighbours(train.features, val.features, train.labels, classes)
    return answers, f"{k} of the network's features"


ANSWERS = {"chance": chance, "logistic regression": regression, "nearest neighbours": neighbours}


@dataclass
class Scores:
    """The baselines' scores, in per cent, and how long each took."""

    train: Images
    val: Images
    classes: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, answer: Callable[[Images, Images, int], tuple[np.ndarray, str]]) -> None:
        begin = time.monotonic()
        answers, how = answer(self.train, self.val, self.classes)
        seconds = round(time.monotonic() - begin, 2)
        self.rows.append({"name": name, "how": how, **accuracies(answers, self.val.labels), "seconds": seconds})
