"""What the runs of a study reached, by method and depth."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cait.errors import UserError
from cait.extras import curves
from cait.run import rundir
from contrib.study.grid import StudyRun

Spread = tuple[float, float]
"""Mean and standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Result(StudyRun):
    """A run, and what it reached on the validation set, in percent."""

    acc1: float
    """The last value."""
    best: float
    loss: float
    train_loss: float
    """The last value that was logged."""
    failed: bool
    """Whether the run stopped giving finite gradients."""

    FIELDS = (
        "method",
        "depth",
        "seed",
        "acc1",
        "best",
        "loss",
        "train_loss",
        "failed",
        "published",
    )

    @property
    def published(self) -> float | None:
        """The paper's top-1 on ImageNet in percent."""
        # here, because the extra may be gone, and with it the networks
        from cait.extras.paper.rows import (
            rows,
        )

        return rows()[self.paper].top1 if self.paper in rows() else None


def result_of(run: StudyRun, folder: Path) -> Result:
    """Read a run's result from a folder with its settings; accuracy is nan if it was never validated."""
    try:
        logged = curves.read(folder)
    except UserError:
        logged = {}

    def values(name: str) -> list[float]:
        return logged[name][1] if name in logged else [math.nan]

    return Result(
        **vars(run),
        acc1=values("val/acc1")[-1],
        best=max(values("val/acc1")),
        loss=values("val/loss")[-1],
        train_loss=values("train/loss")[-1],
        failed=(folder / rundir.NONFINITE).exists(),
    )


class Table:
    """Results of several seeds by method and depth; all of methods, or all of places."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self.methods = list(dict.fromkeys(result.method for result in results))
        self.depths = sorted({result.depth for result in results})

    def of(self, method: str, depth: int | None = None) -> list[Result]:
        return [r for r in self.results if r.method == method and depth in (None, r.depth)]

    def accuracy(self, method: str, depth: int | None = None) -> Spread | None:
        """Mean and standard deviation of the final top-1 over the seeds; None without a run."""
        return mean_and_spread([result.acc1 for result in self.of(method, depth)])

    def gain(self, method: str, first: int, last: int) -> Spread | None:
        """Mean and standard deviation over the seeds of the deeper network's gain."""
        at_first = {result.seed: result.acc1 for result in self.of(method, first)}
        return mean_and_spread(
            [r.acc1 - at_first[r.seed] for r in self.of(method, last) if r.seed in at_first]
        )


def mean_and_spread(values: Sequence[float]) -> Spread | None:
    """Mean and standard deviation of a sample; the deviation of one value is 0. None for no values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), spread
