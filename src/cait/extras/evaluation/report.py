"""What this extra adds to the screen of `cait eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from cait.cli.evaluate import Row, Scores
from cait.data.folder import abbreviate
from cait.errors import console

CONFUSED, FEW = 3, 5
"""The screen shows at most so many pairs and names."""


def rows(core: Sequence[Row], result: Scores) -> Iterator[Row]:
    """The calibration error, and the rows of `core` on each further set."""
    yield Row("calibration error", "{:.2f} %", ("calibration", "ece"))
    of_a_set = [row for row in core if row.place[0] not in ("acc1_macro", "loss")]
    of_a_set.append(Row("classes", "{:,}", ("classes",)))
    places: dict[str, tuple[str, ...]] = {"ReaL": ("real",), "V2": ("v2",)}
    places |= {name: ("extra", name) for name in result["extra"]}
    for title, place in places.items():
        for row in of_a_set:  # others publish top-1 alone, under the name of the set
            published = place[-1] if row.published else ""
            yield Row(f"{title} {row.title}", row.form, (*place, *row.place), published)


def show(result: Scores) -> None:
    """Print what the figures of the raw weights on a whole set hide."""
    raw, screen = result["raw"], console()
    screen.print(_threshold_table(raw))
    if result["tta"]:
        print("scored with mirror images")
    for line in _remarks(raw):
        screen.print(line, highlight=False)


def _remarks(scores: Scores) -> Iterator[str]:
    weak = sorted((share, name) for name, share in scores["per_class"].items() if share is not None and share < 100)
    if weak:
        yield f"weakest classes: {abbreviate([f'{name} ({share:.1f} %)' for share, name in weak], FEW)}"
    if never := scores["never_predicted"]:
        yield f"never predicted: {abbreviate(never, FEW)}"
    if pairs := scores["confusions"]:
        few = [f"{pair['true']} taken for {pair['predicted']} ({pair['images']:,})" for pair in pairs[:CONFUSED]]
        yield f"most confused: {', '.join(few)}"
    if reached := scores["wanted_accuracy"]:
        wanted, threshold, share = reached["wanted"], reached["threshold"], reached["coverage"]
        if threshold is None:
            yield f"no probability is high enough: no answers are right {wanted:g} % of the time"
        else:
            which = f"answer from a probability of {threshold:.4f} on, which {share:.1f} % of the images have"
            yield f"for {wanted:g} % accuracy: {which}"


def _threshold_table(scores: Scores) -> Table:
    """What remains of the answers if those below a probability are "don't know"."""
    shown = [row for row in scores["thresholds"] if row["threshold"]]
    table = Table("answer from a probability of", *(f"{row['threshold']:g}" for row in shown))
    for title, key in (("images answered, %", "coverage"), ("of these right, %", "accuracy")):
        table.add_row(title, *("" if row[key] is None else f"{row[key]:.1f}" for row in shown))
    return table
