"""What a study shows of its results: a table for each run, the report and the figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cait import disk
from cait.errors import UserError
from cait.extras.curves import csv_rows
from contrib.study.results import Result, Table

MONITOR = "monitor.csv"
"""File in the folder of a run that measured its layers, with the columns step, layer, part, name and value."""
RunsByMethod = Mapping[str, Sequence[Path]]
"""Folders of the runs of each method, one for each seed."""
FIRST, LAST = 0, -1
"""Indices of the steps that are shown, among the measured steps."""


def write_csv(results: Sequence[Result], path: Path) -> None:
    """One row for each run, in the order given."""
    disk.write_csv(path, Result.FIELDS, ([getattr(result, name) for name in Result.FIELDS] for result in results))


def write_report(results: Sequence[Result], path: Path, title: str) -> None:
    """The tables as Markdown: means over the seeds, and their spread."""
    methods, places = ([result for result in results if result.is_place is kind] for kind in (False, True))
    lines = [f"# {title}", ""]
    if methods:
        lines += _depth_table(Table(methods))
    if places:
        lines += _place_table(Table(places))
    lines += ["† a run ended early: it gave no finite gradient any more.", ""]
    with disk.whole(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


def _markdown(heading: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table below a heading."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return [f"## {heading}", "", *(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _depth_table(table: Table) -> list[str]:
    first, last = table.depths[0], table.depths[-1]
    seeds = len({result.seed for result in table.results})
    rows = []
    for method in table.methods:
        gain = table.gain(method, first, last)
        signed = f"{gain[0]:+.2f} ± {gain[1]:.2f}" if gain else ""
        rows.append([method, *(_accuracy(table, method, depth) for depth in table.depths), signed])
    titles = ["method", *(f"{depth} blocks" for depth in table.depths), f"{last} against {first}"]
    return _markdown(f"Accuracy by depth: top-1 in per cent, mean ± standard deviation of {seeds} seeds", titles, rows)


def _place_table(table: Table) -> list[str]:
    rows = []
    for place in table.methods:
        top1 = table.of(place)[0].published
        rows.append([place, _accuracy(table, place), "" if top1 is None else f"{top1:.1f}"])
    return _markdown("Where the class token enters", ["place", "top-1", "the paper's, on ImageNet"], rows)


def _accuracy(table: Table, method: str, depth: int | None = None) -> str:
    accuracy = table.accuracy(method, depth)
    failed = any(result.failed for result in table.of(method, depth))
    return (f"{accuracy[0]:.2f} ± {accuracy[1]:.2f}" if accuracy else "") + " †" * failed


def draw_depth(results: Sequence[Result], path: Path) -> None:
    """Accuracy against depth: mean over the seeds, spread as bars."""
    from cait.extras import plots

    table = Table([result for result in results if not result.is_place])
    figure, ((axes,),) = plots.grid(1, 1, 6.5, 4)
    for place, method in enumerate(table.methods):
        found = [(depth, table.accuracy(method, depth)) for depth in table.depths]
        points = [(depth, *accuracy) for depth, accuracy in found if accuracy]
        depths, means, spreads = zip(*points, strict=True) if points else ((), (), ())
        style = dict(marker="o", markersize=3, capsize=2, linestyle="-" if place < 8 else "--")
        axes.errorbar(depths, means, spreads, label=method, **style)
    axes.set(xlabel="self-attention blocks", ylabel="top-1 on the validation set, %", xticks=table.depths)
    figure.legend(loc="outside right upper")
    plots.write(figure, path)


def draw_layers(folders: RunsByMethod, path: Path, title: str) -> None:
    """Means over the seeds by block: the gradient that arrives there at two steps, and the activations' scale."""
    from cait.extras import plots

    panels = [
        ("gradient at the block's input, first measured step", "block", "input_grad_norm", FIRST),
        ("the same, last measured step", "block", "input_grad_norm", LAST),
        ("activations, root mean square, last step", "sa", "activation_rms", LAST),
    ]
    figure, axes = plots.grid(1, len(panels), 12, 3.8)
    for panel, (words, part, name, step) in zip(axes[0], panels, strict=True):
        for place, (method, runs) in enumerate(folders.items()):
            means = _mean_by_layer(runs, part, name, step)
            panel.semilogy(range(1, len(means) + 1), means, label=method, linestyle="-" if place < 8 else "--")
        panel.set(xlabel="block", title=words)
    figure.suptitle(title)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    plots.write(figure, path)


def _mean_by_layer(runs: Sequence[Path], part: str, name: str, step: int) -> list[float]:
    found = [by_layer(folder, part, name, step) for folder in runs]
    return [statistics.mean(values) for values in zip(*filter(None, found), strict=True)]


def by_layer(folder: Path, part: str, name: str, step: int) -> list[float]:
    """A measured figure of each layer at the first (0) or the last (-1) measured step; [] if the run has none."""
    try:
        rows = [row for _, row in csv_rows(folder / MONITOR, "its layers were not measured")]
    except UserError:
        return []
    found = [row for row in rows if (row["part"], row["name"]) == (part, name)]
    values = {(int(row["step"]), int(row["layer"])): float(row["value"]) for row in found}
    steps, layers = (sorted(set(each)) for each in zip(*values, strict=True)) if values else ([], [])
    return [values.get((steps[step], layer), math.nan) for layer in layers]
