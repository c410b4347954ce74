"""What this extra adds to `cait eval`: calibration, confusions and ReaL of each validation, and further sets."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from timm.data import ImageNetInfo
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from cait.cli.evaluate import Row, Scores, Scoring
from cait.data.loader import Loader
from cait.errors import UserError, abbreviate, printable, say
from cait.extras.evaluation.extra_sets import TEST, open_extra, open_test, real_labels
from cait.extras.scores import WEAKEST, weakest
from cait.train.callbacks import EMA

CLASSES_IN_MATRIX = 1000
"""With more classes there is no confusion matrix: it would take gigabytes."""


class Counts(nn.Module):
    """The counts of one set of weights, exact over several processes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.confusion = None
        if num_classes <= CLASSES_IN_MATRIX:
            self.confusion = MulticlassConfusionMatrix(
                num_classes, ignore_index=-1, validate_args=False
            )
        # of 15 bins
        self.calibration = MulticlassCalibrationError(
            num_classes, ignore_index=-1, validate_args=False
        )
        self.real_acc1 = MeanMetric()
        self.real_acc5 = MeanMetric()
        self.real_images = SumMetric()

    def update(self, logits: Tensor, labels: Tensor, real: Tensor | None) -> None:
        """Count a batch: logits [B, num_classes], labels [B], ReaL's labels [B, L]. Those below 0 are not counted."""
        probabilities = logits.float().softmax(dim=1)
        # of NaN, the largest is the first class
        labels = labels.where(probabilities[:, 0].isfinite(), -1)
        if self.confusion:
            self.confusion.update(logits, labels)
        self.calibration.update(probabilities, labels)
        if real is not None:  # an image without a right class is not counted
            best = logits.topk(min(5, logits.shape[1])).indices
            counted = (labels >= 0) & (real >= 0).any(dim=1)
            hits = (best[:, :, None] == real[:, None, :]).any(dim=2)[counted]  # [images, 5]
            self.real_acc1.update(hits[:, 0])
            self.real_acc5.update(hits.any(dim=1))
            self.real_images.update(len(hits))

    def compute(self, with_real: bool) -> Scores:
        """The scores by name; the README lists them."""
        scores: Scores = {"calibration": _percent(self.calibration.compute())}
        if self.confusion:
            scores["confusion"] = self.confusion.compute().tolist()
        if with_real:
            scores["real"] = {
                "acc1": _percent(self.real_acc1.compute()),
                "acc5": _percent(self.real_acc5.compute()),
                "images": int(self.real_images.compute()),
            }
        return scores


def _percent(share: Tensor) -> float | None:
    return None if math.isnan(share) else 100 * float(share)


class Evaluation(Callback):
    """Count the predictions of the raw weights, and of their moving average, in each validation.

    It comes after `EMA` among the callbacks because it reads the average's logits there. Raises UserError if a further
    set cannot be used.
    """

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self.data = scoring.data
        self.extra = scoring.config.extra or {}
        self.scores: dict[str, Scores] = {}
        self.only: Sequence[int] | None = None
        """Indices of the only classes that may be predicted, as ImageNet-A and -R are scored; None allows all."""
        self._hooks: list[RemovableHandle] = []
        if scoring.module.task.several and self.extra:
            raise UserError(
                "--extra scores class folders, and an image of this run may have several classes"
            )
        self._sets = {
            name: open_extra(Path(place), self.data.class_names)
            for name, place in self.extra.items()
        }
        if TEST not in self._sets and (test := open_test(self.data.source)):
            self._sets = {TEST: test, **self._sets}

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        loader: Any = trainer.val_dataloaders
        is_ours = isinstance(loader, Loader) and loader.dataset is self.data.val_images
        self._done = 0
        self._real = None
        if is_ours and self.data.class_names == ImageNetInfo().label_names():
            real = real_labels(self.data.val_images.samples)
            # of this process, in order
            self._real = None if real is None else real[list(loader.sampler.indices)]
        self._ema: Any = EMA.among(trainer.callbacks)  # type: ignore[attr-defined]
        networks = {"raw": pl_module.model}
        if self._ema and self._ema.average is not None:
            networks["ema"] = self._ema.average
        self._hooks = [
            network.register_forward_hook(self._leave_out) for network in networks.values()
        ]
        # what is counted here is of one class per image
        counted = [] if pl_module.task.several else networks
        self._counts = {
            name: Counts(pl_module.num_classes).to(pl_module.device) for name in counted
        }

    def _leave_out(self, network: Any, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        """The logits [B, num_classes], without the classes that a further set does not have."""
        if self.only is None:
            return logits
        known = torch.full_like(logits, -math.inf, dtype=torch.float)
        known[:, self.only] = logits[:, self.only].float()
        return known

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        labels = batch[1]
        done = self._done
        self._done += len(labels)
        real = None if self._real is None else self._real[done : self._done].to(labels.device)
        for name, counts in self._counts.items():
            counts.update(outputs if name == "raw" else self._ema.logits, labels, real)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        self.scores = {
            name: counts.compute(self._real is not None) for name, counts in self._counts.items()
        }

    def extend(self, result: Scores) -> None:
        """Score the further sets."""
        self.scoring.trainer.datamodule = None  # the data module would list all its images again
        result["extra"] = ({TEST: "the test split"} if TEST in self._sets else {}) | self.extra
        for name, extra_set in self._sets.items():
            self.only = extra_set.only
            loader = self.data.extra_val_dataloader(extra_set.samples)
            for weights, scores in self.scoring.validate(
                model=self.scoring.module, dataloaders=loader
            ).items():
                result[weights].setdefault("extra", {})[name] = scores

    def rows(self, core: Sequence[Row], result: Scores) -> Iterator[Row]:
        """The calibration error, and the rows of `core` on each further set."""
        yield Row("calibration error", "{:.2f} %", ("calibration",))
        shown = [row for row in core if row.place[0] not in ("acc1_macro", "loss")]
        for title, *path in [
            ("ReaL", "real"),
            *((name, "extra", name) for name in result["extra"]),
        ]:
            for row in shown:
                yield Row(f"{title} {row.title}", row.form, (*path, *row.place))

    def show(self, result: Scores) -> None:
        """Print the classes with the lowest accuracy."""
        if weak := weakest(result[self.scoring.chosen]["per_class"]):
            names = [f"{printable(name)} ({share:.1f} %)" for share, name in weak]
            say(f"weakest classes: {abbreviate(names, WEAKEST)}")
