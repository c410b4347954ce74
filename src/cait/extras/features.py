"""The features that a network has of images, which are what its head sees in evaluation, and a head solved on them.

Fine-tuning from a solved head changes the features less than from one at random ("Fine-Tuning can Distort Pretrained
Features and Underperform Out-of-Distribution", Kumar et al., ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import default_collate

from cait import cores
from cait.data.dataset import EvalImages, Samples
from cait.data.reading import UnreadableImageError, UnreadableImages, load_image
from cait.errors import UserError
from cait.model.network import in_evaluation, logits_of

BATCH = 64
SIDE = 32
"""Larger images are averaged down to this many pixels a side before their pixels are kept."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
"""Values of C as scikit-learn has it: the larger, the weaker the regularization."""
USUAL = 0.1
"""C where no class has enough images to hold some out."""
HELD_OUT = 5
"""One of this many images of each class is held out to choose C."""
LBFGS: Any = dict(max_iter=200, tolerance_grad=1e-4, line_search_fn="strong_wolfe")
"""Of the solver, at each C; the tolerance is of the gradient's largest value."""
WORK = 200_000_000
"""Most images × values × classes (10 or more) that `classify` learns from: about 20 seconds of a core."""


class Extracted(NamedTuple):
    """The images of a set that can be read."""

    features: np.ndarray
    """float32 [N, D]; [N, 0] if left out."""
    labels: np.ndarray
    """int64 [N], as the samples have them; -1 without a class."""
    kept: np.ndarray
    """int64 [N], the indices of the images among the samples."""
    pixels: np.ndarray
    """float16 [N, 3 * S * S], normalized, S at most SIDE; [N, 0] if not asked for."""

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
    features: bool = True,
    head: nn.Module | None = None,
) -> Extracted:
    """Read the `chosen` images once, under the evaluation transform of a data module, and take their features.

    The network is left as it was. The features are the inputs of the `head`; None takes the first of `classifiers`.
    Raises UserError if the network has no classifier, does not call it, or gives features that are not finite.
    """
    unreadable = UnreadableImages()
    images = EvalImages(samples, data.eval_transform, unreadable, data.settings)
    chosen = range(len(samples)) if chosen is None else chosen
    home = next(network.parameters()).device
    columns = []
    network.to(device)
    try:
        with in_evaluation(network), ThreadPoolExecutor(cores.share(1)) as pool:
            for start in range(0, len(chosen), BATCH):
                batch, labels = default_collate(
                    [*pool.map(images.__getitem__, chosen[start : start + BATCH])]
                )
                batch = batch.to(device)
                seen = data.normalize_and_erase(batch) if batch.dtype == torch.uint8 else batch
                side = min(SIDE, seen.shape[-1]) if pixels else 0
                small = (
                    nn.functional.adaptive_avg_pool2d(seen, side).flatten(1).half().cpu().numpy()
                )
                vectors = (
                    inputs(network, head, seen)
                    if features
                    else np.empty((len(seen), 0), np.float32)
                )
                columns.append((vectors, labels.numpy(), small))
    finally:
        network.to(home)
    vectors, labels, thumbnails = map(np.concatenate, zip(*columns, strict=True))
    if not np.isfinite(vectors).all():
        raise UserError("the network has features that are not finite")
    readable = np.array([samples.name(index) not in unreadable.seen for index in chosen])
    return Extracted(vectors, labels, np.array(chosen), thumbnails).at(readable)


@torch.inference_mode()
def inputs(network: nn.Module, head: nn.Module | None, images: Tensor) -> np.ndarray:
    """What the head sees of images [B, 3, S, S]: float32 [B, D], a mean over tokens or places if it sees several."""
    # here, because runs that take no features do not load it
    from cait.model.weights import (
        classifiers,
    )

    seen: list[Tensor] = []
    for layer in [head] if head else classifiers(network)[:1]:
        with layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0])):
            logits_of(network, images)
    if not seen:
        raise UserError(
            "features are what the classifier sees, and the network calls none: give it get_classifier()"
        )
    features = seen[-1].movedim(1, -1) if isinstance(layer, nn.Conv2d) else seen[-1]
    return features.reshape(len(features), -1, features.shape[-1]).mean(1).float().cpu().numpy()


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` numbers, evenly over them."""
    taken = min(count, most)
    return [i * count // taken for i in range(taken)]


def one_of_each(images: EvalImages, labels: Iterable[int]) -> Iterator[tuple[int, int, Any]]:
    """The first readable image of each of the labels: its number, its label, and the image as it is decoded."""
    missing = {*labels}
    for index in range(len(images)):
        if not missing:
            break
        with suppress(UnreadableImageError):
            raw, label = images.samples[index]
            if label in missing:
                image = load_image(raw, images.samples.name(index), images.reading)
                missing.remove(label)
                yield index, label, image


class Rows(NamedTuple):
    """What a head is solved on."""

    features: Tensor
    """float64 [N, D]."""
    targets: Tensor
    """[N], the class of each row; or [N, C] of 0 and 1, if a row may have several."""
    weights: Tensor
    """[N], how much each row counts, 1 in the mean."""

    def part(self, chosen: Tensor) -> Rows:
        return Rows(*(column[chosen] for column in self))

    def loss(self, layer: Tensor) -> Tensor:
        """The mean loss under a layer [D + 1, C]. Its last row is the bias. Of several labels, one against the rest."""
        logits = torch.addmm(layer[-1], self.features, layer[:-1])
        if self.targets.ndim == 2:
            losses = binary_cross_entropy_with_logits(
                logits, self.targets.to(logits), reduction="none"
            ).sum(1)
        else:
            losses = cross_entropy(logits, self.targets, reduction="none")
        return (losses * self.weights).mean()


class Head(NamedTuple):
    """A linear layer on features as they are, [C, D] and [C], and the C that was taken."""

    weight: Tensor
    bias: Tensor
    strength: float


def solve(
    features: Tensor,
    targets: Tensor,
    classes: int,
    weights: Tensor | None = None,
    strength: float | None = None,
) -> Head:
    """The head that fits all rows best. It is solved on standardized features, and folded to take them as they are.

    Features, targets and weights are as in `Rows`, the weights in any unit. Without a C, the `strength`, it takes the
    one that does best on rows which are held out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the bits do not depend on their number
    try:
        features = features.double()
        mean = features.mean(0)
        deviation = features.std(0, correction=0)
        deviation = deviation.where(deviation > 0, 1.0)
        counts = torch.ones(len(features)) if weights is None else weights / weights.mean()
        rows = Rows((features - mean) / deviation, targets, counts.double())
        layer = torch.zeros(features.shape[1] + 1, classes, dtype=torch.float64)
        if strength is None:
            layer, strength = _chosen(rows, layer)
        layer = fit(rows, strength, layer)
    finally:
        torch.set_num_threads(threads)
    weight = layer[:-1].T / deviation
    return Head(weight.float(), (layer[-1] - weight @ mean).float(), strength)


def _chosen(rows: Rows, layer: Tensor) -> tuple[Tensor, float]:
    """The layer and the C with the least loss on the rows held out, from strong regularization to weak."""
    is_held_out = held_out(rows.targets)
    if not is_held_out.any():
        return layer, USUAL
    seen = rows.part(~is_held_out)
    unseen = rows.part(is_held_out)
    least = torch.inf
    best = layer, USUAL
    for strength in STRENGTHS:
        layer = fit(seen, strength, layer)
        loss = unseen.loss(layer).item()
        if loss >= least:
            break
        least = loss
        best = layer, strength
    return best


def held_out(targets: Tensor) -> Tensor:
    """Which rows are held out, bool [N]: one of HELD_OUT of each class, spread evenly over them."""
    labels = targets.argmax(1) if targets.ndim == 2 else targets
    is_held_out = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        is_held_out[(labels == label).nonzero()[HELD_OUT - 1 :: HELD_OUT]] = True
    return is_held_out


def fit(rows: Rows, strength: float, start: Tensor) -> Tensor:
    """The layer [D + 1, C] with the least loss and L2 penalty on all but the bias, from a start of that shape."""
    layer = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([layer], **LBFGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rows.loss(layer) + layer[:-1].square().sum() / (2 * strength * len(rows.features))
        loss.backward()
        return loss

    optimizer.step(closure)
    return layer.detach()


def classify(rows: np.ndarray, labels: np.ndarray, others: np.ndarray, classes: int) -> np.ndarray:
    """The classes of `others` [M, D] by a head that is solved on rows [N, D], or a part of them, with C 1."""
    most = WORK // (rows.shape[1] * max(10, classes))
    some = evenly(len(rows), max(2 * classes, most))
    head = solve(
        torch.from_numpy(rows[some]), torch.from_numpy(labels[some]), classes, strength=1.0
    )
    return (others @ head.weight.numpy().T + head.bias.numpy()).argmax(1)
