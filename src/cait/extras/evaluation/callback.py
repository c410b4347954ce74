"""What `cait eval` and `cait validate` count beyond loss and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras.evaluation import calibration
from cait.extras.evaluation.real_labels import is_imagenet, real_labels
from cait.train.ema import EMA
from cait.train.metrics import STANDARD

Scores = dict[str, Any]
CONFUSIONS = 20
"""Pairs of classes that are listed as the most confused."""
CLASSES_IN_JSON = 1000
"""Up to this many classes the JSON file holds the confusion matrix itself, 3 MB of it."""


class RealAccuracy(Metric):
    """Top-1 and top-5 in per cent where several classes may be right; an image without any is not counted."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Images, those right at the first guess, those right within five. Integers, so that the sums are exact.
        self.add_state("counts", torch.zeros(3, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes], right classes [B, L], padded with -1."""
        best = logits.topk(min(5, logits.shape[1])).indices
        hits = (best[:, :, None] == labels[:, None, :]).any(dim=2)  # [B, 5]
        self.counts += torch.stack([(labels >= 0).any(dim=1).sum(), hits[:, 0].sum(), hits.any(dim=1).sum()])

    def compute(self) -> Scores:
        images, *right = self.counts.tolist()
        acc1, acc5 = (100 * count / images if images else None for count in right)
        return {"acc1": acc1, "acc5": acc5, "images": images}


class Confusion(Metric):
    """The confusion matrix as a list of its cells: the matrix of 21,000 classes would take 3.5 GB."""

    cells: list[Tensor]

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("cells", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Note the cell of each image: logits [B, num_classes], labels [B]. Labels below 0 are not counted."""
        cells = labels * self.num_classes + logits.argmax(dim=1)
        self.cells.append(cells.where(labels >= 0, -1))  # to leave them out now, the host would wait for the device

    def compute(self) -> np.ndarray:
        """Rows of (true class, predicted class, images), [K, 3], in the order of the classes."""
        cells, images = dim_zero_cat(self.cells).unique(return_counts=True)
        table = torch.stack([cells // self.num_classes, cells % self.num_classes, images], dim=1)
        return table[cells >= 0].cpu().numpy()


class Confidence(Metric):
    """The probability of each image's predicted class, and whether that is the true one."""

    confidence: list[Tensor]
    right: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("right", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Note a batch: logits [B, num_classes], labels [B]. Labels below 0 are not counted."""
        confidence, predicted = logits.float().softmax(dim=1).max(dim=1)
        self.confidence.append(confidence.where(labels >= 0, -1.0))
        self.right.append(predicted == labels)

    def compute(self) -> tuple[np.ndarray, np.ndarray]:
        """(probabilities [N], whether they are of the true class [N])"""
        confidence, right = (dim_zero_cat(values).cpu().numpy() for values in (self.confidence, self.right))
        return confidence[confidence >= 0], right[confidence >= 0]


class Counts(nn.Module):
    """The counts of one set of weights, exact over several processes.

    Args:
        wanted: accuracy, as a share, whose threshold to find; None finds none.
    """

    def __init__(self, num_classes: int, wanted: float | None = None) -> None:
        super().__init__()
        self.wanted = wanted
        self.confusion = Confusion(num_classes)
        self.confidence = Confidence()
        self.real = RealAccuracy()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Labels below 0 are not counted."""
        self.confusion.update(logits, labels)
        self.confidence.update(logits, labels)
        if real is not None:
            self.real.update(logits, real.where(labels[:, None] >= 0, -1))

    def compute(self, class_names: list[str], with_real: bool) -> Scores:
        confusion = self.confusion.compute()
        true, predicted, images = confusion.T
        of_class, right = (
            np.bincount(true[part], images[part], len(class_names)) for part in (slice(None), true == predicted)
        )
        scores: Scores = {
            "images": int(images.sum()),
            # A class without an image has no accuracy.
            "per_class": {
                name: 100 * hits / count if count else None
                for name, hits, count in zip(class_names, right.tolist(), of_class.tolist(), strict=True)
            },
            "confusion": confusion,
            "confusions": _most_confused(confusion, of_class, class_names),
        }
        shares = [share for share in scores["per_class"].values() if share is not None]
        scores["acc1_macro"] = sum(shares) / len(shares) if shares else None
        guessed = np.bincount(predicted, images, len(class_names))
        scores["never_predicted"] = [class_names[i] for i in np.flatnonzero((guessed == 0) & (of_class > 0))]
        scores |= self._trust()
        if len(class_names) <= CLASSES_IN_JSON:
            matrix = np.zeros((len(class_names),) * 2, np.int64)
            matrix[true, predicted] = images
            scores["confusion"] = matrix.tolist()
        return scores | ({"real": self.real.compute()} if with_real else {})

    def _trust(self) -> Scores:
        confidence, right = self.confidence.compute()
        return {
            "calibration": calibration.calibration(confidence, right),
            "thresholds": calibration.thresholds(confidence, right),
            "wanted_accuracy": None if self.wanted is None else calibration.reach(confidence, right, self.wanted),
        }


def _most_confused(confusion: np.ndarray, of_class: np.ndarray, class_names: Sequence[str]) -> list[Scores]:
    """The pairs of classes with the most mistakes, the most first; `share` is of the true class, in per cent."""
    wrong = confusion[confusion[:, 0] != confusion[:, 1]]
    order = np.argsort(-wrong[:, 2], kind="stable")[:CONFUSIONS]
    return [
        {
            "true": class_names[true],
            "predicted": class_names[predicted],
            "images": int(images),
            "share": 100 * images / of_class[true],
        }
        for true, predicted, images in wrong[order].tolist()
    ]


class Evaluation(Callback):
    """Count the predictions of the raw weights, and of their moving average, in each validation.

    It must come after `EMA` among the callbacks because it reads the average's logits there. After a validation
    `scores` has, under "raw" and (if there is an average) "ema":

    - `acc1`, `acc5` in per cent, `loss`, and every metric of your own that was logged as val/<name>;
    - `images`: how many were counted;
    - `per_class`: accuracy in per cent by class name;
    - `acc1_macro`: the mean of those accuracies;
    - `never_predicted`: names of classes that have images but were never predicted;
    - `confusions`: the most confused pairs of classes;
    - `calibration`, `thresholds` and `wanted_accuracy`, see `cait.extras.evaluation.calibration`;
    - `confusion`: rows are true classes, columns predicted ones. Above CLASSES_IN_JSON classes it is an array as
      `Confusion` gives it;
    - `real`, if the ReaL labels of the validation set are known: `acc1`, `acc5` and `images`.

    Args:
        data: the data module.
        real: file of ReaL labels; None takes timm's copy if the data is ImageNet.
        hflip: test-time augmentation: score the mean of the probabilities of an image and its mirror image.
        wanted: accuracy, as a share, whose threshold to find; None finds none.
    """

    def __init__(
        self, data: ImageNetDataModule, real: str | None, hflip: bool = False, wanted: float | None = None
    ) -> None:
        self.data, self.real, self.hflip, self.wanted = data, real, hflip, wanted
        self.scores: dict[str, Scores] = {}
        self.only: Sequence[int] | None = None
        """Indices of the only classes that may be predicted, as ImageNet-A and -R are scored; None allows all."""
        self._hooks: list[RemovableHandle] = []
        self._mirroring = False

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        loader: Any = trainer.val_dataloaders
        self._order, self._done = loader.sampler.indices, 0  # the images that this process sees, in order
        self._real = self._real_labels() if loader.dataset is self.data.val_images else None
        self._ema: Any = next((callback for callback in trainer.callbacks if isinstance(callback, EMA)), None)  # type: ignore[attr-defined]
        average = self._ema.average if self._ema else None
        weights = ("raw",) if average is None else ("raw", "ema")
        self._counts = {name: Counts(pl_module.num_classes, self.wanted).to(pl_module.device) for name in weights}
        networks = (pl_module.model, average)
        self._hooks = [network.register_forward_hook(self._judge) for network in networks if network is not None]

    def _judge(self, network: Any, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        """The logits that are scored instead of the network's own, [B, num_classes]."""
        if self._mirroring:
            return logits
        if self.hflip:
            self._mirroring = True  # the call runs this hook again; a sharded network has to be called
            mirrored = network(inputs[0].flip(-1))
            self._mirroring = False
            views = torch.stack([logits.float(), mirrored.float()]).log_softmax(dim=2)
            logits = views.logsumexp(dim=0) - math.log(2)
        if self.only is not None:
            left_out = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            left_out[list(self.only)] = False
            logits = logits.float().masked_fill(left_out, -math.inf)
        return logits

    def _real_labels(self) -> Tensor | None:
        names = self.data.class_names
        if self.real is None and not is_imagenet(names):
            return None
        try:
            return real_labels(self.real, self.data.val_images.samples, len(names))
        except UserError as error:
            if self.real is not None:
                raise
            rank_zero_info(f"ReaL is not scored: {error}")  # a part of ImageNet, or under other names
            return None

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        labels = batch[1]
        images = list(self._order[self._done : self._done + len(labels)])
        self._done += len(labels)
        real = None if self._real is None else self._real[images].to(labels.device)
        for name, counts in self._counts.items():
            counts.update(outputs if name == "raw" else self._ema.logits, labels, real)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        metrics = trainer.callback_metrics
        self.scores = {}
        for name, counts in self._counts.items():
            prefix = "val/" if name == "raw" else "val_ema/"
            logged = {key.removeprefix(prefix): _number(metrics[key]) for key in metrics if key.startswith(prefix)}
            self.scores[name] = logged | counts.compute(self.data.class_names, self._real is not None)


def own_metrics(scores: Scores) -> list[str]:
    """Names of the metrics that are the user's own."""
    return [name for name in scores if name not in STANDARD]


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON knows no others
