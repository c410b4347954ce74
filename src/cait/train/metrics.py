"""What the labels of an image are, and the metrics of a whole set: loss, top-1 and top-5, and the user's own."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from cait import ckpt, plugins
from cait.errors import UserError, told_as
from cait.references import locate, made
from cait.train.losses import Loss, LossSettings

STANDARD = ("acc1", "acc5", "loss", "images", "per_class", "acc1_macro")
"""Names of the scores that every evaluation has; a metric of the user's own must have another name."""

HIGHER = {"acc", "acc1", "acc5", "accuracy", "f1", "map", "auc", "auroc", "precision", "recall"}
LOWER = {"loss", "error", "errors", "err", "nll", "ece", "mae", "mse", "rmse", "perplexity"}
"""Words in the name of a metric whose largest value, or whose smallest, is the best."""
Figures = dict[str, Tensor]
"""The values of metrics by name, each []."""


class Counts(Metric):
    """What a validation counts: the images of each class, those that are right, also in top-5, and the sum of losses.

    torchmetrics' own classes bin num_classes² cells for each batch, which takes seconds for 21,841 classes, leave NaN
    out of a mean, and add up in bfloat16 in a network of bfloat16.
    """

    classes: Tensor
    right_in_5: Tensor
    loss: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.add_state(
            "classes", torch.zeros(num_classes, 2, dtype=torch.long), dist_reduce_fx="sum"
        )
        self.add_state("right_in_5", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("loss", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes] in float32, labels [B]."""
        right = (logits.argmax(dim=1) == labels).long()
        self.classes.index_add_(0, labels, torch.stack([torch.ones_like(right), right], dim=1))
        best = logits.topk(min(5, len(self.classes))).indices
        self.right_in_5 += (best == labels[:, None]).sum()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        self.loss = self.loss + loss  # not in place: Lightning may have made the state bfloat16

    def compute(self) -> tuple[Tensor, Figures]:
        """(images, correct) of each class, [num_classes, 2], and the figures by name."""
        images, right = self.classes.sum(dim=0)
        figures = {"loss": self.loss / images, "acc1": 100 * (right / images)}
        has_five = len(self.classes) >= 5  # any answer is among the five of fewer
        if has_five:
            figures["acc5"] = 100 * (self.right_in_5 / images)
        return self.classes.clone(), figures


class EvalMetrics(nn.Module):
    """Loss and top-1 / top-5 accuracy in percent over a whole set, exact over several processes.

    Raises UserError if one of `own` cannot be made, is no metric, or has a name that is taken.

    Args:
        own: further metrics by name, as "package.module:name" of something that is called with num_classes and
            returns a `torchmetrics.Metric` of logits [B, num_classes] and labels [B].
        per_class: `compute` gives `acc1_macro` too, the mean of the classes' recalls in percent.
    """

    SIZE = "num_classes"
    """The keyword of torchmetrics for the number of classes."""

    def __init__(
        self, num_classes: int, own: Mapping[str, str] | None = None, per_class: bool = False
    ) -> None:
        super().__init__()
        self.counter: Any = self._make(num_classes)
        size = {self.SIZE: num_classes}
        self.own = {name: _metric(name, path, size) for name, path in (own or {}).items()}
        """The user's own metrics by name."""
        # no ModuleDict, because it refuses names such as "keys"
        self._own = nn.ModuleList(self.own.values())
        self.with_macro = per_class
        self.per_class = torch.zeros(num_classes, 2, dtype=torch.long)
        """(images, correct) of each class, [num_classes, 2], as `compute` counted them last."""
        self.is_finite = False
        """Whether the loss that `compute` gave last is finite. If not, the classes of NaN would count as answers."""

    def _make(self, num_classes: int) -> Metric:
        """Make what `_standard` reads."""
        return Counts(num_classes)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits [B, num_classes], labels [B] or [B, num_classes]; those below 0 are not counted."""
        counted = (labels if labels.ndim == 1 else labels[:, 0]) >= 0
        logits, labels = logits[counted].float(), labels[counted].long()
        self.counter.update(logits, labels)
        # a metric of the user's own may not expect that, or take 0 / 0 into a mean
        if not len(labels):
            return
        for name, metric in self.own.items():
            with told_as(f"the metric {name} fails"):
                metric.update(logits.clone(), labels.clone())  # it may change them

    def compute(self, prefix: str) -> Figures:
        """The values under their logged names, such as `val/acc1`. Counting then starts again.

        If the loss is not finite, all of them are NaN.
        """
        figures = self._standard()
        self.is_finite = bool(figures["loss"].isfinite())
        if self.with_macro:
            images, correct = self.per_class[self.per_class[:, 0] > 0].float().unbind(1)
            figures["acc1_macro"] = 100 * (correct / images).mean()
        has_images = bool(self.per_class.any())
        for name, metric in self.own.items():
            with told_as(f"the metric {name} fails"):
                figures[name] = (
                    _number(metric) if self.is_finite and has_images else torch.tensor(torch.nan)
                )
        for metric in [self.counter, *self.own.values()]:
            # a fit may follow `Trainer.validate`, and counts in place
            with torch.inference_mode(False):
                metric.reset()
        if not self.is_finite:
            figures = {name: torch.full_like(value, torch.nan) for name, value in figures.items()}
        return {f"{prefix}/{name}": value for name, value in figures.items()}

    def _standard(self) -> Figures:
        """The values that every evaluation has, and `per_class`."""
        self.per_class, figures = self.counter.compute()
        return figures

    def by_class(self, names: Sequence[str]) -> dict[str, Any]:
        """What `compute` counted last: images, the recall of each class of these names in percent, and their mean."""
        recalls = [
            100 * correct / images if images and self.is_finite else None
            for images, correct in self.per_class.tolist()
        ]
        known = [recall for recall in recalls if recall is not None]
        return {
            "images": int(self.per_class[:, 0].sum()),
            "per_class": dict(zip(names, recalls, strict=True)),
            "acc1_macro": sum(known) / len(known) if known else None,
        }


def _metric(name: str, path: str, size: dict[str, int]) -> Metric:
    if name in STANDARD:
        raise UserError(f"a metric of your own cannot be called {name}, which is there already")
    metric = made(path, **size)
    if not isinstance(metric, Metric):
        raise UserError(f"{path} must return a torchmetrics.Metric, got {type(metric).__name__}")
    return metric


def _number(metric: Metric) -> Tensor:
    """The value [] of a metric, in all processes that of the first; NaN if torchmetrics calls it meaningless."""
    is_shared = dist.is_initialized()
    if is_shared:
        _even_lists(metric)
    value = torch.as_tensor(_value(metric), device=metric.device).float()
    if value.numel() != 1:
        raise ValueError(
            f"it must compute one number, as with average='macro', not {value.numel()}"
        )
    value = value.reshape(())
    if is_shared:
        dist.broadcast(value, 0)
    return value


def _value(metric: Metric) -> Any:
    """What a metric computes."""
    with warnings.catch_warnings():
        # where no image was counted, others have counted some
        warnings.filterwarnings("ignore", ".*was called before the ``update``")
        # as an AUROC of images of one class, which it gives as 0; it warns in the first process alone
        warnings.filterwarnings("error", ".*meaningless")
        try:
            return metric.compute()
        except UserWarning:
            if metric._is_synced:
                metric.unsync()
            return torch.nan


def _even_lists(metric: Metric) -> None:
    """Make the lists of a metric as long in all processes, by tensors of no image.

    torchmetrics gathers tensor by tensor, and has to know types and dimensions where no image was counted.
    """
    states = [
        state
        for module in metric.modules()
        if isinstance(module, Metric)
        for state in module.metric_state.values()
    ]
    lists = [state for state in states if isinstance(state, list)]
    types = [[(tensor.dtype, tensor.shape[1:]) for tensor in state] for state in lists]
    everywhere = [types] * dist.get_world_size()
    dist.all_gather_object(everywhere, types)
    for state, *of_processes in zip(lists, *everywhere, strict=True):
        longest = max(of_processes, key=len)
        for dtype, shape in longest[len(state) :]:
            state.append(torch.empty((0, *shape), dtype=dtype, device=metric.device))


Mode = Literal["max", "min"]


def best_mode(metric: str, own: Mapping[str, Any]) -> Mode | None:
    """Whether the largest ("max") or the smallest value of a metric is the best; None if nothing says so.

    One of the user's `own` says it by torchmetrics' `higher_is_better`, any other by its name, as "val/loss". They are
    given by name: as `EvalMetrics.own`, or paths as in `--model.metrics`.
    """
    measure = own.get(metric.rpartition("/")[2])
    if isinstance(measure, str):
        measure = locate(measure)
    is_better = getattr(measure, "higher_is_better", None)
    if isinstance(is_better, bool):
        return "max" if is_better else "min"
    words = set(re.findall(r"[^\W_]+", metric.lower()))
    if words.isdisjoint(HIGHER) == words.isdisjoint(LOWER):
        return None
    return "min" if words.isdisjoint(HIGHER) else "max"


def known_mode(metric: str, own: Mapping[str, Any]) -> Mode:
    """`best_mode`, or a UserError if nothing says it."""
    mode = best_mode(metric, own)
    if mode is None:
        raise UserError(
            f"--best_metric {metric}: is the largest value best, or the smallest? Add --best_mode max|min"
        )
    return mode


def metric_of_best(asked: str | None, usual: str, has_average: bool) -> str:
    """The metric that chooses best.ckpt: as asked, or the `usual` one, of the moving average if there is one.

    Raises UserError if one of an average is asked for, and there is none.
    """
    if asked is None:
        return f"{ckpt.VAL_EMA if has_average else ckpt.VAL}/{usual}"
    if asked.startswith(f"{ckpt.VAL_EMA}/") and not has_average:
        raw = asked.replace(ckpt.VAL_EMA, ckpt.VAL, 1)
        raise UserError(
            f"--best_metric {asked} is of a moving average: give --ema.decay, or --best_metric {raw}"
        )
    return asked


Best = list[dict[str, Any]]
"""The classes of an image, the most probable first: {"class": name, "index": number, "probability": p}"""


class OneClass:
    """Each image has one class, and the probabilities of its classes add up to one."""

    metric = "acc1"
    """The metric of validation that chooses best.ckpt unless a setting says otherwise."""
    several = False
    """Whether an image may have any number of classes, with targets [B, num_classes] of 0 and 1."""
    metadata: ClassVar[dict[str, Any]] = {}
    """What a reader of an exported network has to know beyond the classes' names."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def loss(self, settings: LossSettings, data: Any = None) -> Loss:
        """The loss that the settings ask for; with a data module it is to weight the classes."""
        if data is not None:
            raise UserError(
                "class_weights is for images of several classes; for one class per image take data.balance"
            )
        return settings.build_loss()

    def metrics(self, own: Mapping[str, str], per_class: bool) -> EvalMetrics:
        """The metrics of a validation, the user's `own` among them."""
        return EvalMetrics(self.num_classes, own, per_class)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, num_classes] in float32."""
        return logits.float().softmax(dim=1)

    def best(
        self, probabilities: Tensor, class_names: Sequence[str], top_k: int | None = None
    ) -> list[Best]:
        """The `top_k` most probable classes for each row of probabilities [B, num_classes]; None means 5.

        Raises UserError if they are not finite: a class of NaN is no answer.
        """
        if not probabilities.isfinite().all():
            raise UserError("the network's answers are not finite")
        values, indices = probabilities.topk(min(top_k or 5, probabilities.shape[1]))
        answers = []
        for row in zip(values.tolist(), indices.tolist(), strict=True):
            answers.append(
                [
                    {"class": class_names[i], "index": i, "probability": p}
                    for p, i in zip(*row, strict=True)
                ]
            )
        return answers


def task_named(name: str | None, num_classes: int) -> Any:
    """The task of a name; None is `OneClass`. Raises UserError if no extra has it."""
    if name is None:
        return OneClass(num_classes)
    tasks = plugins.by_name("TASKS")
    if name not in tasks:
        raise UserError(f"the network's task is {name}, which needs an extra that is not here")
    return locate(tasks[name])(num_classes)
