"""Before the first step: solve the head of a run that starts from weights, and validate it as step 0."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from cait.errors import UserError
from cait.extras.features import Extracted, evenly, extract, solve
from cait.model.weights import classifiers

WORK = 1_000_000_000
VALUES = 100_000_000
"""Most images × values × classes that are solved on, about half a minute of a core; and most images × values, 2 GB."""


class SolveHead(Callback):
    """Solves a new head, and validates it before the first step, so that it is the best to beat.

    A run that trains its head alone is done then. The first process solves the head, and the others receive it.
    """

    def __init__(self) -> None:
        self.is_solved = False
        self.scores: dict[str, float] = {}
        """Of the solved head on the validation images, in percent."""
        self.drawn: list[Tensor] = []
        """The weights of the head as they are before those of a file are read."""

    def state_dict(self) -> dict[str, Any]:
        return {"is_solved": self.is_solved, "scores": self.scores}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.is_solved = state_dict["is_solved"]
        self.scores = state_dict.get("scores", {})

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if hasattr(trainer.strategy, "shard_module"):
            raise UserError(
                "the head of a sharded network cannot be solved: set --model.solve_head false"
            )
        self.drawn = [weight.clone() for weight in head_weights(pl_module)]

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        start: Any = trainer
        if start.ckpt_path is not None or start.fast_dev_run or not self._is_new(pl_module):
            return
        if start.datamodule is None:
            raise UserError(
                "solve_head reads the training images of a data module: give fit() one, or set it to false"
            )
        layers = classifiers(pl_module.model)
        if other := [
            layer for layer in layers if not isinstance(layer, nn.Linear) or layer.bias is None
        ]:
            rank_zero_info(
                f"the head is not solved, it starts at random: {pl_module.name} ends in {type(other[0]).__name__}, "
                "not in Linear with a bias"
            )
            return
        rank_zero_info("solving the head on the features of the training images")
        for layer in layers:
            solve_layer(trainer, pl_module, layer)
        self.is_solved = True

    def _is_new(self, pl_module: Any) -> bool:
        """Whether there are weights, and they have left the head as it was drawn."""
        start = pl_module.settings
        if not start.weights and not start.pretrained:
            return False
        return any(
            torch.equal(before.to(now), now)
            for before, now in zip(self.drawn, head_weights(pl_module), strict=True)
        )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Also after a resume, because the rows of step 0 are not kept.
        pl_module.validates_first = self.is_solved and trainer.global_step == 0
        # its head alone was to be learned
        if self.is_solved and pl_module.hparams["freeze"] is True:
            rank_zero_info("no epoch is trained: the head is solved, and the rest is frozen")
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.validates_first and trainer.global_step == 0 and not trainer.sanity_checking:
            shown = []
            for name in (pl_module.task.metric, "acc1_macro", *(pl_module.settings.metrics or ())):
                score = trainer.callback_metrics.get(f"val/{name}")
                if score is None:
                    continue
                if name.startswith("acc1"):
                    self.scores[name] = float(score)
                    shown.append(f"val/{name} {score:.2f} %")
                else:
                    shown.append(f"val/{name} {score:.4f}")
            rank_zero_info(f"step 0, the solved head: {', '.join(shown)}")


def head_weights(pl_module: Any) -> list[Tensor]:
    return [
        layer.weight.detach() for layer in classifiers(pl_module.model) if hasattr(layer, "weight")
    ]


def solve_layer(trainer: Trainer, pl_module: Any, layer: nn.Linear) -> None:
    """Solve one head in the first process, on the features that it sees, and put the result into it in all."""
    head: Any = None
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    classes = pl_module.num_classes
    if trainer.is_global_zero:
        samples = data.train_images.samples
        most = min(WORK // classes, VALUES) // layer.in_features
        chosen = evenly(len(samples), max(2 * classes, most))
        seen = extract(pl_module.model, samples, data, pl_module.device, chosen, head=layer)
        labels = torch.from_numpy(seen.labels)
        weights = weights_of(seen, data, pl_module)
        head = solve(torch.from_numpy(seen.features), data._targets(labels), classes, weights)
        rank_zero_info(
            f"head solved on {len(labels):,} of {len(samples):,} images, C {head.strength:g}"
        )
    head = trainer.strategy.broadcast(head)
    with torch.no_grad():
        layer.weight.copy_(head.weight)
        layer.bias.copy_(head.bias)


def weights_of(seen: Extracted, data: Any, pl_module: Any) -> Tensor:
    """How much each image counts, [N]: as often as the run draws its label, and as much as its loss weights it."""
    labels = torch.from_numpy(seen.labels)
    drawn = torch.bincount(
        data.order(torch.Generator().manual_seed(0)), minlength=len(data.train_images)
    )
    share = torch.bincount(labels, drawn[seen.kept]) / torch.bincount(labels).clamp(min=1)
    class_weights = getattr(pl_module.loss, "weights", None)
    if class_weights is not None and not pl_module.task.several:
        share = share * class_weights.cpu()[: len(share)]
    return share[labels]
