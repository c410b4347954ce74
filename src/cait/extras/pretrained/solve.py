"""Before the first step: solve the head of a run that starts from weights, and validate it as step 0."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from cait.extras.extract import BATCH, Extracted, evenly, extract
from cait.extras.pretrained.head import VALUES, WORK, Head, solve
from cait.model.weights import classifiers


class SolveHead(Callback):
    """Solves a new head, and validates it before the first step, so that it is the best to beat.

    A run that trains its head alone is done then. All processes take the features of their share of the images; the
    first solves the head, and the others receive it.
    """

    def __init__(self) -> None:
        self.is_solved = False

    def state_dict(self) -> dict[str, Any]:
        return {"is_solved": self.is_solved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.is_solved = state_dict["is_solved"]

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        wanted = pl_module.head_is_new and pl_module.hparams["solve_head"]
        if wanted and trainer.ckpt_path is None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if reason := unsolvable(trainer, pl_module):
                rank_zero_info(f"the head is not solved, it starts at random: {reason}")
            else:
                rank_zero_info("solving the head on the features of the training images")
                self._solve(trainer, pl_module)

    def _solve(self, trainer: Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        for layer in classifiers(pl_module.model):
            begin = time.monotonic()
            seen = gathered(trainer, pl_module, layer)
            taken = time.monotonic() - begin
            found: Head | None = None
            if trainer.is_global_zero:
                features, labels = torch.from_numpy(seen.features), torch.from_numpy(seen.labels)
                weights = weights_of(seen.kept, labels, data, pl_module)
                found = solve(features, data._targets(labels), pl_module.num_classes, *weights)
            found = trainer.strategy.broadcast(found)
            assert found is not None
            with torch.no_grad():
                layer.weight.copy_(found.weight)
                layer.bias.copy_(found.bias)
            images = f"{len(seen.kept):,} of {len(data.train_images):,} images"
            seconds = f"features {taken:.1f} s, head {time.monotonic() - begin - taken:.1f} s"
            rank_zero_info(f"head solved on {images}, C {found.strength:g}: {seconds}")
        self.is_solved = True

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Also after a resume, because the rows of step 0 are not kept.
        pl_module.validates_first = self.is_solved and trainer.global_step == 0
        if not pl_module.validates_first or not trainer.enable_validation:
            self._end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        if pl_module.validates_first and trainer.global_step == 0:
            scores = [(name, trainer.callback_metrics.get(name)) for name in ("val/acc1", "val/acc1_macro")]
            shown = [f"{name} {float(score):.2f} %" for name, score in scores if score is not None]
            rank_zero_info(f"step 0, the solved head: {', '.join(shown)}")
        self._end(trainer, pl_module)

    def _end(self, trainer: Trainer, pl_module: Any) -> None:
        """End a run whose head alone was to be learned."""
        if self.is_solved and pl_module.hparams["freeze"] is True:
            rank_zero_info("no epoch is trained: the head is solved, and the rest is frozen")
            trainer.should_stop = True


def unsolvable(trainer: Trainer, pl_module: Any) -> str:
    """Why the head cannot be solved; empty if it can."""
    layers = classifiers(pl_module.model)
    if not layers or not all(isinstance(layer, nn.Linear) and layer.bias is not None for layer in layers):
        last = type(layers[0]).__name__ if layers else "no layer"
        return f"{pl_module.name} ends in {last}, not in Linear with a bias"
    if getattr(trainer.datamodule, "train_images", None) is None:  # type: ignore[attr-defined]
        return "there is no data module whose images it could see"
    return ""


def weights_of(kept: np.ndarray, labels: Tensor, data: Any, pl_module: Any) -> tuple[Tensor, Tensor | None]:
    """How much each image counts, [N], and the positive part of each class, [C] or None, as in the run's loss.

    Args:
        kept: int64 [N], the indices of the images.
        labels: int64 [N], as the data's samples have them.
    """
    drawn = torch.bincount(data.order(torch.Generator().manual_seed(0)), minlength=len(data.train_images))
    share = torch.bincount(labels, drawn[kept]) / torch.bincount(labels).clamp(min=1)
    of_class = getattr(pl_module.loss, "weights", None)
    if of_class is None or pl_module.task.several:
        return share[labels], of_class
    return (share * of_class.cpu()[: len(share)])[labels], None


def gathered(trainer: Trainer, pl_module: Any, layer: nn.Linear) -> Extracted:
    """What a layer sees of the training images, as many as can be solved on.

    Each process takes a share of whole batches, so that the batches are the same for any number of processes.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    samples, classes = data.train_images.samples, pl_module.num_classes
    indices = evenly(len(samples), max(2 * classes, min(WORK // classes, VALUES) // layer.in_features))
    batches = [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]
    own = [index for batch in batches[trainer.global_rank :: trainer.world_size] for index in batch]
    with trainer.precision_plugin.forward_context():
        found = extract(pl_module.model, samples, data, pl_module.device, own or indices[:1], head=layer)
    found = found.at(slice(None if own else 0))  # with fewer batches than processes some have none
    parts = [found] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(parts, found)
    whole = Extracted(*map(np.concatenate, zip(*parts, strict=True)))
    return whole.at(whole.kept.argsort())
