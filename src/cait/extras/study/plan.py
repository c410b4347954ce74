"""Does depth pay, and where does the class token belong: the grid of `configs/study.yaml`, its results and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import yaml

from cait import disk
from cait.errors import UserError, did_you_mean, one_line
from cait.extras.paper.rows import CONFIGS, rows
from cait.run import rundir
from cait.settings import Settings, as_text

GRID = CONFIGS / "study.yaml"
PLACES = "places"
PLACES_DEPTH = 12

RunsByMethod = dict[str, list[Path]]
"""Folders of the runs of each method, one for each seed."""
FIRST_AND_LAST = (0, -1)
"""Indices of the steps that are shown, among the monitored steps."""


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    method: str
    depth: int
    seed: int
    settings: Settings
    paper: str | None = None
    """Id of the paper's row that it repeats, as "table1/layerscale-36"; the paper may have no row of this depth."""
    is_place: bool = False
    """Whether it is of Table 2, not of Table 1."""

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}" if self.is_place else f"{self.method}-{self.depth}-seed{self.seed}"


class Grid:
    """The trials of a grid file.

    Args:
        path: the file; `configs/study.yaml` says what stands in one.
        size: one of its sizes.
        data: folder to train on; None takes the embedded digits.

    Raises:
        UserError: the file is missing or not a grid, or it has no such size.
    """

    def __init__(self, path: Path = GRID, size: str = "quick", data: str | None = None) -> None:
        try:
            content = yaml.safe_load(path.read_text())
            sizes, self._content = content["sizes"], content
            base = content["data" if data else "digits"]
            self.config = CONFIGS / base["config"]
            self.monitored_every = int(base["monitor_every_n_steps"])
            if size not in sizes:
                hint = did_you_mean(size, sizes, f"; it has {', '.join(sizes)}")
                raise UserError(f"{path} has no size {size!r}{hint}")
            self.chosen = sizes[size]
            self.base: Settings = base["settings"] | content["every_run"] | ({"data.root": data} if data else {})
            self.trials = [*self._methods(), *self._places()]
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"cannot read the grid {path}: {one_line(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a grid of a study: {type(error).__name__} {error}") from error

    def _seeds(self) -> range:
        return range(self.chosen["seeds"])

    def _methods(self) -> Iterable[Trial]:
        rates, known = self._content["drop_path_rate"], self._content["methods"]
        # Deep runs first: the last to end is then a short one.
        for seed in self._seeds():
            for depth in sorted(self.chosen["depths"], reverse=True):
                for method in self.chosen.get("methods", known):
                    about = dict(known[method])
                    paper, adapted = about.pop("paper", None), about.pop("adapted", True)
                    rate = rates[depth] if adapted else rates[min(rates)]
                    settings = about | {"model.fields.depth": depth, "model.drop_path_rate": rate}
                    yield Trial(method, depth, seed, settings, paper and f"{paper}-{depth}")

    def _places(self) -> Iterable[Trial]:
        known, rate = self._content[PLACES], self._content["drop_path_rate"][PLACES_DEPTH]
        for seed in self._seeds():
            for place in self.chosen.get(PLACES, known):
                plain = {"model.fields.residual": "plain", "model.fields.depth": PLACES_DEPTH}
                settings = plain | {"model.drop_path_rate": rate} | known[place]
                yield Trial(place, settings["model.fields.depth"], seed, settings, f"table2/{place}", is_place=True)

    def originals(self) -> dict[str, Trial]:
        """By each trial's name, the first trial with the same settings and seed: only that one is trained."""
        first: dict[tuple[str, ...], Trial] = {}
        return {trial.name: first.setdefault(tuple(sorted(self.arguments(trial))), trial) for trial in self.trials}

    def arguments(self, trial: Trial) -> list[str]:
        """Arguments of `cait fit` for a trial, besides `config` and the run's folder."""
        settings = self.base | trial.settings
        settings |= {"seed_everything": trial.seed, "monitor.every_n_steps": self.monitored_every}
        return [f"--{name}={as_text(value)}" for name, value in settings.items()]


@dataclass(frozen=True)
class Result:
    """What a trial reached on the validation set, in per cent."""

    method: str
    depth: int
    seed: int
    acc1: float
    """The last value."""
    best: float
    loss: float
    train_loss: float
    """The last value that was logged."""
    failed: bool
    """Whether the run stopped giving finite gradients."""
    seconds: float
    paper: str | None
    """As in `Trial`."""
    is_place: bool

    FIELDS = ("method", "depth", "seed", "acc1", "best", "loss", "train_loss", "failed", "seconds", "published")

    @property
    def published(self) -> float | None:
        """The paper's top-1 on ImageNet in per cent."""
        row = rows().get(self.paper or "")
        return row.top1 if row else None


def result_of(trial: Trial, folder: Path, seconds: float) -> Result:
    """Read a trial's result from the folder of its run; accuracy is nan if it was never validated."""
    from cait.run import curves

    try:
        found = curves.read(folder)
    except UserError:
        found = {}
    values = {name: found.get(name, ([], []))[1] or [math.nan] for name in ("val/acc1", "val/loss", "train/loss")}
    return Result(
        trial.method,
        trial.depth,
        trial.seed,
        acc1=values["val/acc1"][-1],
        best=max(values["val/acc1"]),
        loss=values["val/loss"][-1],
        train_loss=values["train/loss"][-1],
        failed=(folder / rundir.NONFINITE).exists(),
        seconds=round(seconds, 1),
        paper=trial.paper,
        is_place=trial.is_place,
    )


def as_of(trial: Trial, result: Result) -> Result:
    """The result of another trial of the same settings, as this trial's."""
    return replace(result, method=trial.method, paper=trial.paper, is_place=trial.is_place)


class Table:
    """Results of several seeds by method and depth.

    Args:
        results: of one kind, methods or places.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results

    @cached_property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(result.method for result in self.results))

    @cached_property
    def depths(self) -> list[int]:
        return sorted({result.depth for result in self.results})

    def of(self, method: str, depth: int | None = None) -> list[Result]:
        return [r for r in self.results if r.method == method and depth in (None, r.depth)]

    def accuracy(self, method: str, depth: int) -> tuple[float, float] | None:
        """Mean and standard deviation of the final top-1 over the seeds; None without a run."""
        return mean_and_spread([result.acc1 for result in self.of(method, depth)])

    def gain(self, method: str, first: int, last: int) -> tuple[float, float] | None:
        """Mean and standard deviation over the seeds of the deeper network's gain."""
        at_first = {result.seed: result.acc1 for result in self.of(method, first)}
        gains = [r.acc1 - at_first[r.seed] for r in self.of(method, last) if r.seed in at_first]
        return mean_and_spread(gains)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and standard deviation of a sample; the deviation of one value is 0. None for no values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def write_csv(results: Sequence[Result], path: Path) -> None:
    """One row for each run, in the order given."""
    disk.write_csv(path, Result.FIELDS, ([getattr(result, name) for name in Result.FIELDS] for result in results))


def write_report(results: Sequence[Result], folders: RunsByMethod, path: Path, title: str) -> None:
    """The tables as Markdown: means over the seeds, their spread, and the paper's figures.

    Args:
        results: of all runs.
        folders: the runs of the deepest networks.
        path: file to write.
        title: of the page.
    """
    methods, places = ([r for r in results if r.is_place is kind] for kind in (False, True))
    lines = [f"# {title}", ""]
    if methods:
        lines += [*_depth_tables(Table(methods)), "", *_gradient_table(folders), ""]
    if places:
        lines += [*_place_table(Table(places)), ""]
    lines += ["† a run ended early: it gave no finite gradient any more.", ""]
    with disk.whole(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


def _depth_tables(table: Table) -> list[str]:
    first, last = table.depths[0], table.depths[-1]
    seeds = len({result.seed for result in table.results})
    yours = [
        f"## Accuracy by depth: top-1 in per cent, mean ± standard deviation of {seeds} seeds",
        "",
        *_head(["method", *(f"{depth} blocks" for depth in table.depths), f"{last} against {first}"]),
    ]
    for method in table.methods:
        cells = [_cell(table.of(method, depth), table.accuracy(method, depth)) for depth in table.depths]
        yours.append(_row([method, *cells, _signed(table.gain(method, first, last))]))
    published = {method: _published(table.of(method)[0].paper) for method in table.methods}
    depths = sorted({depth for figures in published.values() for depth in figures})
    theirs = [
        "",
        "## The same in the paper, on ImageNet",
        "",
        *_head(["method", *(f"{depth} blocks" for depth in depths)]),
    ]
    for method, figures in published.items():
        if figures:
            theirs.append(_row([method, *(f"{figures[depth]:.1f}" if depth in figures else "" for depth in depths)]))
    return yours + theirs if depths else yours


def _published(paper: str | None) -> dict[int, float]:
    """Top-1 by depth, from all rows of the paper with the same method as the row `paper`."""
    method = (paper or "").rpartition("-")[0]
    found = {id: row.top1 for id, row in rows().items() if method and id.rpartition("-")[0] == method}
    return {int(id.rpartition("-")[2]): top1 for id, top1 in found.items() if top1 is not None}


def _gradient_table(folders: RunsByMethod) -> list[str]:
    titles = [f"{step} step: {place} block" for step in ("first", "last") for place in ("first", "last")]
    lines = [
        "## Gradient at the blocks' inputs, in the deepest networks",
        "",
        "Norms of a step's gradient, means over the seeds.",
        "",
        *_head(["method", *titles]),
    ]
    for method, runs in folders.items():
        steps = [_mean_by_layer(runs, "block", "input_grad_norm", step) for step in FIRST_AND_LAST]
        if all(steps):
            lines.append(_row([method, *(f"{norms[place]:.2g}" for norms in steps for place in (0, -1))]))
    return lines


def _place_table(table: Table) -> list[str]:
    lines = ["## Where the class token enters", "", *_head(["place", "top-1", "the paper's, on ImageNet"])]
    for place in table.methods:
        results = table.of(place)
        published = results[0].published
        cell = _cell(results, mean_and_spread([result.acc1 for result in results]))
        lines.append(_row([place, cell, "" if published is None else f"{published:.1f}"]))
    return lines


def _cell(results: Sequence[Result], accuracy: tuple[float, float] | None) -> str:
    failed = " †" if any(result.failed for result in results) else ""
    return (f"{accuracy[0]:.2f} ± {accuracy[1]:.2f}" if accuracy else "") + failed


def _signed(gain: tuple[float, float] | None) -> str:
    return f"{gain[0]:+.2f} ± {gain[1]:.2f}" if gain else ""


def _head(titles: Sequence[str]) -> list[str]:
    return [_row(titles), _row(["---"] + ["---:"] * (len(titles) - 1))]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw_depth(results: Sequence[Result], path: Path) -> None:
    """Accuracy against depth: mean over the seeds, spread as bars."""
    from cait import plots

    table = Table([result for result in results if not result.is_place])
    figure, axes = plots.grid(1, 1, 6.5, 4)
    for place, method in enumerate(table.methods):
        found = [(depth, table.accuracy(method, depth)) for depth in table.depths]
        points = [(depth, *accuracy) for depth, accuracy in found if accuracy]
        depths, means, spreads = zip(*points, strict=True) if points else ((), (), ())
        style = dict(marker="o", markersize=3, capsize=2, linestyle="-" if place < 8 else "--")
        axes[0, 0].errorbar(depths, means, spreads, label=method, **style)
    axes[0, 0].set(xlabel="self-attention blocks", ylabel="top-1 on the validation set, %", xticks=table.depths)
    figure.legend(loc="outside right upper")
    plots.write(figure, path)


def draw_layers(folders: RunsByMethod, path: Path, title: str) -> None:
    """The gradient that arrives at each block, at the first and the last monitored step, and the activations' scale.

    Args:
        folders: the lines are means over the seeds.
        path: file to write.
        title: of the figure.
    """
    from cait import plots

    panels = [
        ("gradient at the block's input, first monitored step", "block", "input_grad_norm", FIRST_AND_LAST[0]),
        ("the same, last monitored step", "block", "input_grad_norm", FIRST_AND_LAST[1]),
        ("activations, root mean square, last step", "sa", "activation_rms", FIRST_AND_LAST[1]),
    ]
    figure, axes = plots.grid(1, len(panels), 12, 3.8)
    for place, (method, runs) in enumerate(folders.items()):
        for axis, (_, part, name, step) in zip(axes[0], panels, strict=True):
            means = _mean_by_layer(runs, part, name, step)
            axis.semilogy(range(1, len(means) + 1), means, label=method, linestyle="-" if place < 8 else "--")
    for axis, (words, *_) in zip(axes[0], panels, strict=True):
        axis.set(xlabel="block", title=words)
    figure.suptitle(title)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    plots.write(figure, path)


def _mean_by_layer(runs: Sequence[Path], part: str, name: str, step: int) -> list[float]:
    found = [by_layer(folder, part, name, step) for folder in runs]
    return [statistics.mean(values) for values in zip(*filter(None, found), strict=True)]


def by_layer(folder: Path, part: str, name: str, step: int) -> list[float]:
    """A monitored figure of each layer at the first (0) or the last (-1) measured step; [] if the run has none."""
    from cait.extras.monitor import measured

    try:
        table = measured.read(folder).get((part, name))
    except UserError:
        return []
    return [] if table is None else table.values[:, step].tolist()
