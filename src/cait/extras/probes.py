"""The features that a network has of images, and what simple classifiers of scikit-learn make of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cait.errors import UserError

WORK, ITERATIONS = 400_000_000, 200
"""Bounds of the regression: images × values of each × classes (10 or more), and passes over them. Together about 20
seconds of a core, and 160 MB."""
NEIGHBOURS = 20


def classifier(network: Any) -> nn.Module | None:
    """The layer that gives the logits, of a network with two heads the first: `get_classifier()`'s, or the last linear
    one. None if there is none."""
    found = network.get_classifier() if hasattr(network, "get_classifier") else None
    if isinstance(found, tuple | list):
        found = found[0]
    return found if isinstance(found, nn.Module) else last_linear(network)


def last_linear(network: nn.Module, classes: int | None = None) -> nn.Linear | None:
    """The last linear layer, or the last with `classes` outputs."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return next((layer for layer in reversed(layers) if classes in (None, layer.out_features)), None)


@torch.inference_mode()
def inputs(network: nn.Module, head: nn.Module, images: Tensor) -> np.ndarray:
    """What the head sees of images [B, 3, S, S]: float32 [B, D], a mean over tokens or places if it sees several.

    Raises:
        UserError: the network does not call its head.
    """
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        network(images.to(next(network.parameters()).dtype))
    finally:
        hook.remove()
    if not seen:
        raise UserError("the network does not call its classifier, so nothing tells what its features are")
    features = seen[-1].movedim(1, -1) if isinstance(head, nn.Conv2d) else seen[-1]
    return features.reshape(len(features), -1, features.shape[-1]).mean(1).float().cpu().numpy()


@contextmanager
def on(device: torch.device, network: nn.Module) -> Iterator[nn.Module]:
    """The network on a device and in evaluation; afterwards as it was."""
    training, home = network.training, next(network.parameters()).device
    try:
        yield network.to(device).eval()
    finally:
        network.to(home).train(training)


def regression(
    rows: np.ndarray,
    val_rows: np.ndarray,
    labels: np.ndarray,
    classes: int,
    work: float = WORK,
    iterations: int = ITERATIONS,
) -> tuple[np.ndarray, int]:
    """The answers of a logistic regression on standardised rows [N, P] to other rows, and how many rows it has seen."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    kept = evenly(len(rows), max(2 * classes, min(len(rows), work // (rows.shape[1] * max(10, classes)))))
    with warnings.catch_warnings(), threadpool_limits(1):  # on a busy machine threads wait for each other
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its iterations
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=iterations))
        model.fit(rows[kept].astype(np.float32), labels[kept])
    return model.predict(val_rows.astype(np.float32)), len(kept)


def neighbours(
    features: np.ndarray, val_features: np.ndarray, labels: np.ndarray, classes: int
) -> tuple[np.ndarray, int]:
    """The answers of the nearest features [N, D] by their cosine, weighted by their distance, and how many are asked.

    These are a tenth of the images of a class, from 1 to NEIGHBOURS.
    """
    from sklearn.neighbors import KNeighborsClassifier

    k = min(NEIGHBOURS, max(1, len(labels) // (10 * classes)), len(labels))
    model = KNeighborsClassifier(k, weights="distance", metric="cosine").fit(features, labels)
    return model.predict(val_features), k


def accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 accuracy and its mean over the classes that have images, in per cent, as a run logs them."""
    from sklearn.metrics import accuracy_score, recall_score

    macro = recall_score(labels, answers, labels=np.unique(labels), average="macro", zero_division=0)
    return {"acc1": 100 * float(accuracy_score(labels, answers)), "acc1_macro": 100 * float(macro)}


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` numbers, evenly over them."""
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def of_all(kept: int, total: int) -> str:
    """The end of a sentence about images, if not all were taken."""
    return f" of {kept:,} of {total:,} images" if kept < total else ""
