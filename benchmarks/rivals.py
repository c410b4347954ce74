"""The recipe for a folder beside other learners, in equal time of the clock.

    python benchmarks/rivals.py FOLDERS [--folders NAME ...] [--minutes 3] [--seeds 3] [--out benchmarks/rivals.md]

FOLDERS is where benchmarks/folders.py has put its folders; the judge folders are the default. The learners are

- the recipe: `cait fit --data.root DIR --minutes M`;
- a CNN of three layers, timm's `resnet10t` and a small ViT, from scratch: the same command with the network, AdamW and
  the rate of `RIVALS`. The recipe gives them its images, augmentation and length, measured for each;
- scikit-learn's logistic regression on the same pixels, as the run's own baselines have it, in whatever time it takes.

A run is scored by its last epoch. Each finished run is a row of the CSV file, and is not done again; remove the file to
start afresh.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import timm
from report import REPO, show, stamp
from torch import nn

from cait import disk

JUDGES = ("letters", "emoji-google", "emoji-apple", "katakana", "icons", "surfaces")
RIVALS: dict[str, dict[str, Any]] = {
    "CNN of 3 layers": {"model.name": "rivals:cnn", "model.optimizer": "adamw", "model.lr": 2e-3},
    "resnet10t": {"model.name": "timm/resnet10t", "model.optimizer": "adamw", "model.lr": 2e-3},
    "ViT": {
        "model.name": "timm/vit_tiny_patch16_224",
        "model.fields": "{patch_size: 8, embed_dim: 192, depth: 6, num_heads: 3}",
        "model.optimizer": "adamw",
        "model.lr": 1e-3,
    },
}
RECIPE, REGRESSION = "the recipe", "logistic regression"
LEARNERS = (RECIPE, *RIVALS, REGRESSION)
FIELDS = ("folder", "learner", "seed", "epochs", "seconds", "acc1", "acc1_macro")
Row = dict[str, str]


def cnn(img_size: int, num_classes: int, width: int = 32) -> nn.Module:
    """Three layers of convolution, BatchNorm, ReLU and pooling, and a linear head on what 4 × 4 places see."""
    layers: list[nn.Module] = []
    channels = 3
    for wider in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, num_classes))


@dataclass
class Rows:
    """The finished runs, one a row of the CSV file `rows`. A row that is there is not made again."""

    folders: Path
    scratch: Path
    rows: Path
    minutes: float

    fields: ClassVar[tuple[str, ...]] = FIELDS
    keys: ClassVar[tuple[str, ...]] = ("folder", "learner", "seed")

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
        with disk.whole(self.rows) as beside, beside.open("w", newline="") as file:
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


class Bench(Rows):
    """The learners that start from nothing, on the folders."""

    def score(self, folder: str, learner: str, seed: int) -> None:
        """Train and note a row, if there is none; with the first of the recipe, that of logistic regression."""
        if (folder, learner, str(seed)) in self.done:
            return
        run, regresses = (
            self.scratch / "logs" / f"{folder}-{learner.replace(' ', '-')}-{seed}",
            learner == RECIPE and not seed,
        )
        asked = {"data.root": self.folders / folder, "from": "none", "minutes": self.minutes, "seed_everything": seed}
        asked |= {"baselines": regresses, "run_name": run.name, "trainer.enable_progress_bar": False}
        asked |= RIVALS.get(learner, {})
        command = [sys.executable, "-m", "cait", "fit", *(f"--{name}={value}" for name, value in asked.items())]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPO / "src", REPO / "benchmarks")))}
        log, begin = self.scratch / f"{run.name}.txt", time.monotonic()
        with log.open("w") as output:
            done = subprocess.run(command, cwd=self.scratch, env=variables, stdout=output, stderr=output)
        if done.returncode:
            raise self.failed(command, log)
        took = time.monotonic() - begin
        with (run / "metrics.csv").open() as file:
            last = [row for row in csv.DictReader(file) if row.get("val/acc1")][-1]
        row = dict(folder=folder, learner=learner, seed=seed, epochs=1 + int(last["epoch"]), seconds=f"{took:.1f}")
        self.add(**row, **{name: f"{float(last[f'val/{name}']):.2f}" for name in ("acc1", "acc1_macro")})
        if regresses:
            known = json.loads((run / "baselines.json").read_text())["baselines"]
            found = next(each for each in known if each["name"] == REGRESSION)
            row = dict(folder=folder, learner=REGRESSION, seed=0, seconds=f"{found['seconds']:.1f}")
            self.add(**row, **{name: f"{found[name]:.2f}" for name in ("acc1", "acc1_macro")})


def spread(values: Sequence[float], mark: str = "") -> str:
    """Mean, between two marks, ± standard deviation."""
    return f"{mark}{statistics.mean(values):.1f}{mark}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def taken(rows: Sequence[Row]) -> str:
    return f"{statistics.mean(float(row['seconds']) for row in rows):.0f} s"


def table(
    done: Sequence[Row],
    folders: Sequence[str],
    learners: Sequence[str] = LEARNERS,
    aside: Callable[[Sequence[Row]], str] = taken,
) -> Iterator[str]:
    """A row for each learner: on each folder val/acc1 and in brackets what `aside` says of its runs, and the mean."""
    yield f"| | {' | '.join(folders)} | mean |"
    yield f"|---|{'---|' * (len(folders) + 1)}"
    for learner in (name for name in learners if any(row["learner"] == name for row in done)):
        cells, means = [], []
        for folder in folders:
            rows = [row for row in done if (row["folder"], row["learner"]) == (folder, learner) and row["acc1"]]
            scores = [float(row["acc1"]) for row in rows]
            means += [statistics.mean(scores)] if scores else []
            cells.append(f"{spread(scores, '**')} ({aside(rows)})" if scores else "")
        overall = f"{statistics.mean(means):.1f}" if len(means) == len(folders) else ""
        yield f"| {learner} | {' | '.join(cells)} | {overall} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, metavar="FOLDERS")
    parser.add_argument("--folders", nargs="+", default=JUDGES, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=3, help="of a run, from the command to its end")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=Path, default=REPO / "benchmarks/rivals.csv", help="the finished runs")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    given = parser.parse_args()
    if missing := [name for name in given.folders if not (given.root / name / "train").is_dir()]:
        parser.error(f"{given.root} has no folder {', '.join(missing)}; make it with benchmarks/folders.py")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(given.root.absolute(), Path(scratch), given.rows.absolute(), given.minutes)
        for seed, folder, learner in itertools.product(range(given.seeds), given.folders, (RECIPE, *RIVALS)):
            bench.score(folder, learner, seed)
    lines = [
        "# The recipe for a folder beside other learners, in equal time",
        "",
        f"`python benchmarks/rivals.py FOLDERS --minutes {given.minutes:g} --seeds {given.seeds}`, {stamp()}, ",
        f"timm {timm.__version__}.",
        "",
        f"val/acc1 after the last epoch, the mean of {given.seeds} seeds and their standard deviation; in brackets the",
        "seconds from the command to its end. The regression has no seed and takes its time.",
        "",
        *table(list(bench.done.values()), given.folders),
    ]
    show(lines, given.out)


if __name__ == "__main__":
    main()
