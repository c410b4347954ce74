"""The rows, tables and remarks that this extra adds to the screen of `cait eval`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from cait.cli.evaluate import Report, Row, Scores
from cait.data.folder import abbreviate
from cait.extras.evaluation.extra_sets import ALEXNET

CONFUSED, FEW = 3, 5
"""The screen shows at most so many pairs and names."""


def describe(report: Report, result: Scores) -> None:
    """Add the scores of `result` to the core's."""
    raw = result["raw"]
    if result["tta"]:
        report.title += ", with mirror images"
    *rows, images = report.rows
    further = [row for row in rows if row.place[0] not in ("acc1_macro", "loss")]
    further += [Row("mCE", "{:.2f} %", ("mce",)), images, Row("classes", "{:,}", ("classes",))]
    report.rows[-1:] = [Row("calibration error", "{:.2f} %", ("calibration", "ece")), images]
    places: dict[str, tuple[str, ...]] = {"ReaL": ("real",), "V2": ("v2",)}
    places |= {name: ("extra", name) for name in raw.get("extra", {})}
    for title, place in places.items():
        for row in further:  # others publish top-1 alone, under the name of the set
            published = place[-1] if row.published else ""
            report.rows.append(Row(f"{title} {row.title}", row.form, (*place, *row.place), published))
    for name, scores in raw.get("extra", {}).items():
        if "corruptions" in scores:
            report.tables.append(_corruption_table(name, scores))
    report.tables.append(_threshold_table(raw))
    report.remarks += _remarks(raw)


def _remarks(scores: Scores) -> Iterator[str]:
    """What the figures of a whole set hide."""
    if never := scores["never_predicted"]:
        yield f"never predicted: {abbreviate(never, FEW)}"
    if pairs := scores["confusions"]:
        few = [f"{pair['true']} taken for {pair['predicted']} ({pair['images']:,})" for pair in pairs[:CONFUSED]]
        yield f"most confused: {', '.join(few)}"
    if reached := scores["wanted_accuracy"]:
        if reached["threshold"] is None:
            yield f"no probability is high enough: no answers are right {reached['wanted']:g} % of the time"
        else:
            yield (
                f"for {reached['wanted']:g} % accuracy: answer from a probability of {reached['threshold']:.4f} on, "
                f"which {reached['coverage']:.1f} % of the images have"
            )


def _threshold_table(scores: Scores) -> Table:
    """What remains of the raw weights' answers if those below a probability are "don't know"."""
    shown = [row for row in scores["thresholds"] if row["threshold"]]
    table = Table("answer from a probability of", *(f"{row['threshold']:g}" for row in shown))
    for title, key in (("images answered, %", "coverage"), ("of these right, %", "accuracy")):
        table.add_row(title, *("" if row[key] is None else f"{row[key]:.1f}" for row in shown))
    return table


def _corruption_table(name: str, scores: Scores) -> Table:
    """The raw weights' top-1 by corruption and severity."""
    found = scores["corruptions"]
    severities = sorted({severity for values in found.values() for severity in values})
    table = Table(f"{name}: top-1, % at severity", *severities, "mean")
    for corruption, values in sorted(found.items(), key=lambda each: [*ALEXNET, each[0]].index(each[0])):
        cells = [f"{values[severity]:.1f}" if severity in values else "" for severity in severities]
        table.add_row(corruption, *cells, f"{sum(values.values()) / len(values):.1f}")
    return table
