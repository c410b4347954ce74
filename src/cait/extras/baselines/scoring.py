"""What is scored beside a network: chance, logistic regression on the pixels, nearest neighbours of its features."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cait import cores
from cait.data.dataset import NO_LABEL, EvalImages, Samples
from cait.data.reading import UnreadableImages

MOST = 10_000
"""Images that are read of each set."""
BATCH = 128
SIDE = 64
"""Larger images are averaged down to this many pixels a side for the regression."""
WORK, ITERATIONS = 400_000_000, 200
"""Bounds of the regression: images × values of each × classes (10 or more), and passes over them. Together about 20
seconds of a core, and 160 MB."""
NEIGHBOURS = 20


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


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` numbers, evenly over them."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


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


def last_linear(network: nn.Module, classes: int) -> nn.Linear | None:
    """The layer that gives the logits: the last linear one with so many outputs."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features == classes]
    return layers[-1] if layers else None


@torch.inference_mode()
def inputs(network: nn.Module, head: nn.Linear, images: Tensor) -> np.ndarray:
    """What the head sees of images [B, 3, S, S]: pooled features [B, D]."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        network(images.to(head.weight.dtype))
    finally:
        hook.remove()
    features = seen[-1]
    return features.reshape(len(features), -1, features.shape[-1]).mean(1).float().cpu().numpy()


@contextmanager
def on(device: torch.device, network: nn.Module) -> Iterator[nn.Module]:
    """The network on a device and in evaluation; afterwards as it was."""
    training, home = network.training, next(network.parameters()).device
    try:
        yield network.to(device).eval()
    finally:
        network.to(home).train(training)


def chance(train: Images, val: Images, classes: int) -> tuple[np.ndarray, str]:
    """Answer the class that most training images have."""
    most = np.bincount(train.labels, minlength=classes).argmax()
    return np.full(len(val.labels), most), "always the class with the most training images"


def regression(
    train: Images, val: Images, classes: int, work: float = WORK, iterations: int = ITERATIONS
) -> tuple[np.ndarray, str]:
    """scikit-learn's logistic regression on standardised pixels; of grey images one channel."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    pixels, val_pixels = grey(train.pixels, val.pixels)
    kept = evenly(len(pixels), max(2 * classes, min(len(pixels), work // (pixels.shape[1] * max(10, classes)))))
    with warnings.catch_warnings(), threadpool_limits(1):  # on a busy machine threads wait for each other
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its iterations
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=iterations))
        model.fit(pixels[kept].astype(np.float32), train.labels[kept])
    answers = model.predict(val_pixels.astype(np.float32))
    return answers, f"scikit-learn, on the pixels{of_all(len(kept), len(pixels))}"


def grey(*sets: np.ndarray) -> Iterator[np.ndarray]:
    """One of the three channels if they are the same in all images."""
    channels = [pixels.reshape(len(pixels), 3, -1) for pixels in sets]
    same = all(np.array_equal(planes[:, :1].repeat(3, axis=1), planes) for planes in channels)
    return (planes[:, 0] if same else planes.reshape(len(planes), -1) for planes in channels)


def neighbours(train: Images, val: Images, classes: int) -> tuple[np.ndarray, str]:
    """The nearest training images by the cosine of their features, weighted by their distance.

    A tenth of the images of a class are asked, from 1 to NEIGHBOURS.
    """
    from sklearn.neighbors import KNeighborsClassifier

    k = min(NEIGHBOURS, max(1, len(train.labels) // (10 * classes)), len(train.labels))
    model = KNeighborsClassifier(k, weights="distance", metric="cosine").fit(train.features, train.labels)
    return model.predict(val.features), f"{k} of the network's features"


ANSWERS = {"chance": chance, "logistic regression": regression, "nearest neighbours": neighbours}


def of_all(kept: int, total: int) -> str:
    return f" of {kept:,} of {total:,} images" if kept < total else ""


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


def accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 accuracy and its mean over the classes that have images, in per cent, as a run logs them."""
    from sklearn.metrics import accuracy_score, recall_score

    macro = recall_score(labels, answers, labels=np.unique(labels), average="macro", zero_division=0)
    return {"acc1": 100 * float(accuracy_score(labels, answers)), "acc1_macro": 100 * float(macro)}
