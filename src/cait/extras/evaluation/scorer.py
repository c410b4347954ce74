"""What this extra adds to `cait eval`: counts of each validation, and the scores on further sets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from timm.data import ImageNetInfo
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cait.cli.evaluate import Row, Scorer, Scores, Scoring
from cait.errors import UserError
from cait.extras import plots
from cait.extras.evaluation import calibration, report
from cait.extras.evaluation.counts import Counts
from cait.extras.evaluation.extra_sets import TEST, ExtraSet, open_extra, open_test
from cait.extras.evaluation.real_labels import real_labels
from cait.train.ema import EMA

V2 = "v2"


class Evaluation(Scorer, Callback):
    """Count the predictions of the raw weights, and of their moving average, in each validation.

    It comes after `EMA` among the callbacks because it reads the average's logits there.

    Raises:
        UserError: a setting has no meaning, or a further set cannot be used.
    """

    def __init__(self, scoring: Scoring) -> None:
        self.scoring, self.config, self.data = scoring, scoring.config, scoring.data
        self.scores: dict[str, Scores] = {}
        self.only: Sequence[int] | None = None
        """Indices of the only classes that may be predicted, as ImageNet-A and -R are scored; None allows all."""
        self._several = scoring.module.task.several
        self._hooks: list[RemovableHandle] = []
        self._mirroring = False
        config, names = self.config, self.data.class_names
        if config.wanted_accuracy is not None and not 0 < config.wanted_accuracy <= 1:
            raise UserError(f"--wanted_accuracy is above 0 and at most 1, as 0.95; got {config.wanted_accuracy}")
        if self._several and (config.v2 or config.extra):
            raise UserError("--v2 and --extra score class folders, and an image of this run may have several classes")
        places = {V2: config.v2} if config.v2 else {}
        places |= config.extra or {}
        self._sets = {name: open_extra(Path(place), names) for name, place in places.items()}
        if TEST not in self._sets and (test := open_test(self.data.source)) is not None:
            self._sets = {TEST: test, **self._sets}

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        loader: Any = trainer.val_dataloaders
        self._order, self._done = loader.sampler.indices, 0  # the images that this process sees, in order
        self._real = self._real_labels() if loader.dataset is self.data.val_images else None
        self._ema: Any = next((callback for callback in trainer.callbacks if isinstance(callback, EMA)), None)  # type: ignore[attr-defined]
        networks = {"raw": pl_module.model, "ema": self._ema.average if self._ema else None}
        networks = {name: network for name, network in networks.items() if network is not None}
        self._hooks = [network.register_forward_hook(self._judge) for network in networks.values()]
        counted = [] if self._several else networks  # what is counted here is of one class an image
        self._counts = {
            name: Counts(pl_module.num_classes, self.config.wanted_accuracy).to(pl_module.device) for name in counted
        }

    def _judge(self, network: Any, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        """The logits that are scored instead of the network's own, [B, num_classes]."""
        if self._mirroring:
            return logits
        if self.config.tta:
            self._mirroring = True  # the call runs this hook again; a sharded network has to be called
            mirrored = network(inputs[0].flip(-1))
            self._mirroring = False
            views = torch.stack([logits.float(), mirrored.float()])
            if self._several:
                return views.double().sigmoid().mean(dim=0).logit().float()
            logits = views.log_softmax(dim=2).logsumexp(dim=0) - math.log(2)
        if self.only is not None:
            left_out = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            left_out[list(self.only)] = False
            logits = logits.float().masked_fill(left_out, -math.inf)
        return logits

    def _real_labels(self) -> Tensor | None:
        if self.config.real is None and self.data.class_names != ImageNetInfo().label_names():
            return None
        try:
            return real_labels(self.config.real, self.data.val_images.samples)
        except UserError as error:
            if self.config.real is not None:
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
        self.scores = {
            name: counts.compute(self.data.class_names, self._real is not None) for name, counts in self._counts.items()
        }

    def extend(self, result: Scores) -> None:
        """Score the further sets, and say how all of them were scored."""
        config = self.config
        self.scoring.trainer.datamodule = None  # the data module would list all its images again
        result["tta"], result["v2"] = config.tta, config.v2
        result["real"] = (config.real or "timm's") if "real" in result["raw"] else None
        result["extra"] = dict(config.extra or {})
        if TEST in self._sets:
            result["extra"].setdefault(TEST, "the test split")
        for name, found in self._sets.items():
            for weights, scores in self._score(found).items():
                place = result[weights] if name == V2 else result[weights].setdefault("extra", {})
                place[name] = scores

    def _score(self, found: ExtraSet) -> dict[str, Scores]:
        """The scores of a further set, by weights."""
        self.only = found.only
        loader = self.data.extra_val_dataloader(found.samples)
        scored = self.scoring.validate(model=self.scoring.module, dataloaders=loader)
        if found.only is not None:
            for scores in scored.values():
                scores["classes"] = len(found.only)
        return scored

    def rows(self, core: Sequence[Row], result: Scores) -> Iterable[Row]:
        """Further rows of the table."""
        return report.rows(core, result)

    def show(self, result: Scores) -> None:
        """Print more, and draw the reliability diagram."""
        if self._several:
            return
        report.show(result)
        path = self.scoring.output.with_name(f"{self.scoring.output.stem}-reliability.png")
        titles = {"raw": "raw", "ema": "EMA"}
        plots.write(calibration.diagram({titles[name]: result[name]["calibration"] for name in self.scores}), path)
        print(f"how far to trust the probabilities: {os.path.relpath(path)}")
