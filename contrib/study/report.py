"""What a study shows of its results: the report and the figures."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cait import disk
from cait.extras import plots
from contrib.study.results import Result, Table


def write_report(results: Sequence[Result], path: Path, title: str) -> None:
    """The tables as Markdown: means over the seeds, and their spread."""
    lines = [f"# {title}", ""]
    if methods := [result for result in results if not result.is_place]:
        lines += _depth_table(Table(methods))
    if places := [result for result in results if result.is_place]:
        lines += _place_table(Table(places))
    lines += ["† a run ended early: it gave no finite gradient any more.", ""]
    with disk.atomic_write(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


def _markdown(heading: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table below a heading."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return [f"## {heading}", "", *(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _depth_table(table: Table) -> list[str]:
    first = table.depths[0]
    last = table.depths[-1]
    seeds = len({result.seed for result in table.results})
    rows = []
    for method in table.methods:
        gain = table.gain(method, first, last)
        signed = f"{gain[0]:+.2f} ± {gain[1]:.2f}" if gain else ""
        rows.append([method, *(_accuracy(table, method, depth) for depth in table.depths), signed])
    return _markdown(
        f"Accuracy by depth: top-1 in percent, mean ± standard deviation of {seeds} seeds",
        ["method", *(f"{depth} blocks" for depth in table.depths), f"{last} against {first}"],
        rows,
    )


def _place_table(table: Table) -> list[str]:
    rows = []
    for place in table.methods:
        top1 = table.of(place)[0].published
        rows.append([place, _accuracy(table, place), "" if top1 is None else f"{top1:.1f}"])
    return _markdown(
        "Where the class token enters", ["place", "top-1", "the paper's, on ImageNet"], rows
    )


def _accuracy(table: Table, method: str, depth: int | None = None) -> str:
    accuracy = table.accuracy(method, depth)
    failed = any(result.failed for result in table.of(method, depth))
    return (f"{accuracy[0]:.2f} ± {accuracy[1]:.2f}" if accuracy else "") + " †" * failed


def draw_depth(results: Sequence[Result], path: Path) -> None:
    """Accuracy against depth: mean over the seeds, spread as bars."""
    table = Table([result for result in results if not result.is_place])
    figure, ((axes,),) = plots.grid(1, 1, 6.5, 4)
    for number, method in enumerate(table.methods):
        accuracies = [(depth, table.accuracy(method, depth)) for depth in table.depths]
        points = [(depth, *accuracy) for depth, accuracy in accuracies if accuracy]
        depths, means, spreads = zip(*points, strict=True) if points else ((), (), ())
        line = "-" if number < 8 else "--"
        axes.errorbar(
            depths,
            means,
            spreads,
            label=method,
            marker="o",
            markersize=3,
            capsize=2,
            linestyle=line,
        )
    axes.set(
        xlabel="self-attention blocks", ylabel="top-1 on the validation set, %", xticks=table.depths
    )
    figure.legend(loc="outside right upper")
    plots.write(figure, path)
