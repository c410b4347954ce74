"""What a study shows of its results: a table for each run, the report and the figures."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cait import disk
from cait.errors import UserError
from cait.extras.curves import whole_lines
from cait.extras.study.grid import published
from cait.extras.study.results import Result, Table, mean_and_spread

MONITOR = "monitor.csv"
"""File in the folder of a run that measured its layers, with the columns step, layer, part, name and value."""
RunsByMethod = Mapping[str, Sequence[Path]]
"""Folders of the runs of each method, one for each seed."""
FIRST, LAST = 0, -1
"""Indices of the steps that are shown, among the measured steps."""


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
        lines += [*_depth_table(Table(methods)), "", *_published_table(Table(methods)), *_gradient_table(folders)]
    if places:
        lines += [*_place_table(Table(places)), ""]
    lines += ["† a run ended early: it gave no finite gradient any more.", ""]
    with disk.whole(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


def _depth_table(table: Table) -> list[str]:
    first, last = table.depths[0], table.depths[-1]
    seeds = len({result.seed for result in table.results})
    lines = [
        f"## Accuracy by depth: top-1 in per cent, mean ± standard deviation of {seeds} seeds",
        "",
        *_head(["method", *(f"{depth} blocks" for depth in table.depths), f"{last} against {first}"]),
    ]
    for method in table.methods:
        cells = [_cell(table.of(method, depth), table.accuracy(method, depth)) for depth in table.depths]
        lines.append(_row([method, *cells, _signed(table.gain(method, first, last))]))
    return lines


def _published_table(table: Table) -> list[str]:
    """The paper's figures for the same methods, at all its depths; [] if it has none."""
    by_method = {method: _published(table.of(method)[0].paper) for method in table.methods}
    depths = sorted({depth for by_depth in by_method.values() for depth in by_depth})
    if not depths:
        return []
    lines = ["## The same in the paper, on ImageNet", "", *_head(["method", *(f"{depth} blocks" for depth in depths)])]
    for method, by_depth in by_method.items():
        if by_depth:
            lines.append(_row([method, *(f"{by_depth[depth]:.1f}" if depth in by_depth else "" for depth in depths)]))
    return [*lines, ""]


def _published(paper: str | None) -> dict[int, float]:
    """Top-1 by depth, from all rows of the paper with the same method as the row `paper`."""
    method = (paper or "").rpartition("-")[0]
    rows = {row.rpartition("-"): top1 for row, top1 in published().items()}
    return {int(depth): top1 for (name, _, depth), top1 in rows.items() if method and name == method}


def _gradient_table(folders: RunsByMethod) -> list[str]:
    titles = [f"{step} step: {place} block" for step in ("first", "last") for place in ("first", "last")]
    """The measured gradients; [] if no run has measured its layers."""
    lines = [
        "## Gradient at the blocks' inputs, in the deepest networks",
        "",
        "Norms of a step's gradient, means over the seeds.",
        "",
        *_head(["method", *titles]),
    ]
    rows = []
    for method, runs in folders.items():
        steps = [_mean_by_layer(runs, "block", "input_grad_norm", step) for step in (FIRST, LAST)]
        if all(steps):
            rows.append(_row([method, *(f"{norms[place]:.2g}" for norms in steps for place in (0, -1))]))
    return [*lines, *rows, ""] if rows else []


def _place_table(table: Table) -> list[str]:
    lines = ["## Where the class token enters", "", *_head(["place", "top-1", "the paper's, on ImageNet"])]
    for place in table.methods:
        results = table.of(place)
        top1 = results[0].published
        cell = _cell(results, mean_and_spread([result.acc1 for result in results]))
        lines.append(_row([place, cell, "" if top1 is None else f"{top1:.1f}"]))
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
    from cait.extras import plots

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
    """The gradient that arrives at each block, at the first and the last measured step, and the activations' scale.

    Args:
        folders: the lines are means over the seeds.
        path: file to write.
        title: of the figure.
    """
    from cait.extras import plots

    panels = [
        ("gradient at the block's input, first measured step", "block", "input_grad_norm", FIRST),
        ("the same, last measured step", "block", "input_grad_norm", LAST),
        ("activations, root mean square, last step", "sa", "activation_rms", LAST),
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
    """A measured figure of each layer at the first (0) or the last (-1) measured step; [] if the run has none."""
    try:
        rows = csv.DictReader(whole_lines(folder / MONITOR, "its layers were not measured"))
    except UserError:
        return []
    found = [row for row in rows if (row["part"], row["name"]) == (part, name)]
    values = {(int(row["step"]), int(row["layer"])): float(row["value"]) for row in found}
    steps, layers = (sorted(set(each)) for each in zip(*values, strict=True)) if values else ([], [])
    return [values.get((steps[step], layer), math.nan) for layer in layers]
