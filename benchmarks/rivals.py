"""Finished runs of several learners on several folders, kept as rows of a CSV file, and shown as a table.

benchmarks/pretrained.py uses it. The learners of rivals.md are in the history: `git show 0595015:benchmarks/rivals.py`.
"""

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cait import disk

Row = dict[str, str]


@dataclass
class Rows:
    """The finished runs, one a row of the CSV file `rows`. A row that is there is not made again."""

    folders: Path
    scratch: Path
    rows: Path
    minutes: float

    fields: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[str, ...]]
    """The columns, and those that tell a run from others."""

    def __post_init__(self) -> None:
        self.done: dict[tuple[str, ...], Row] = {}
        if self.rows.exists():
            with self.rows.open(newline="") as file:
                self.done = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in self.keys)

    def add(self, **row: Any) -> Row:
        """Keep a row, at once."""
        cells = {name: str(row.get(name, "")) for name in self.fields}
        self.done[self._key(cells)] = cells
        with disk.atomic_write(self.rows) as beside, beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.fields)
            writer.writeheader()
            writer.writerows(self.done.values())
        print(" ".join(cells.values()), flush=True)
        return cells

    def failed(self, command: Sequence[str], log: Path) -> SystemExit:
        """What ends the benchmark when a run has failed. Its output is kept beside the rows."""
        kept = self.rows.with_suffix(".failed.txt")
        kept.write_text(log.read_text())
        return SystemExit(f"failed, see {kept}: {' '.join(map(str, command))}")


def spread(values: Sequence[float], mark: str = "") -> str:
    """Mean, between two marks, ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mark}{statistics.mean(values):.1f}{mark}{deviation}"


def table(
    done: Sequence[Row],
    folders: Sequence[str],
    learners: Sequence[str],
    aside: Callable[[Sequence[Row]], str],
) -> Iterator[str]:
    """A row for each learner: on each folder val/acc1 and in brackets what `aside` says of its runs, and the mean."""
    yield f"| | {' | '.join(folders)} | mean |"
    yield f"|---|{'---|' * (len(folders) + 1)}"
    for learner in (name for name in learners if any(row["learner"] == name for row in done)):
        cells, means = [], []
        for folder in folders:
            rows = [
                row
                for row in done
                if (row["folder"], row["learner"]) == (folder, learner) and row["acc1"]
            ]
            scores = [float(row["acc1"]) for row in rows]
            means += [statistics.mean(scores)] if scores else []
            cells.append(f"{spread(scores, '**')} ({aside(rows)})" if scores else "")
        overall = f"{statistics.mean(means):.1f}" if len(means) == len(folders) else ""
        yield f"| {learner} | {' | '.join(cells)} | {overall} |"
