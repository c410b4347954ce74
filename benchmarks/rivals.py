"""The recipe for a folder beside other learners, in equal time of the clock.

    python benchmarks/rivals.py FOLDERS [--folders NAME ...] [--minutes 3] [--seeds 3] [--jobs 1]
                                [--rows benchmarks/rivals.csv] [--out benchmarks/rivals.md]

FOLDERS is where benchmarks/folders.py has put its folders; the judge folders are the default. The learners are

- the recipe: `cait fit --data.root DIR --minutes M`;
- a CNN of three layers, timm's `resnet10t` and a small ViT, from scratch: the same command with the network, AdamW and
  the rate of `RIVALS`. The recipe gives them its images, augmentation and length, measured for each;
- scikit-learn's logistic regression on the same pixels, once, in whatever time it takes;
- with --learners: the recipe with another stem, and the blocks that suit it.

A run is scored by its last epoch. Each finished run is a row of the CSV file, and is not done again; remove the file to
start afresh. With --jobs 2 two runs go side by side, each pinned to one core with one thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from report import REPO, show, stamp
from torch import nn

from cait import disk
from cait.cli import saved

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
WIDER = {"model.fields.embed_dim": 128, "model.fields.mlp_ratio": 4}
STEMS: dict[str, dict[str, Any]] = {
    "stem conv": {"model.fields.stem": "conv", "model.fields.depth": 3} | WIDER,
    "stem patch": {"model.fields.stem": "patch", "model.fields.depth": 4} | WIDER,
}
RECIPE, REGRESSION = "the recipe", "logistic regression"
LEARNERS = (RECIPE, *RIVALS, REGRESSION, *STEMS)
FIELDS = ("folder", "learner", "seed", "epochs", "told", "seconds", "acc1", "acc1_macro")
Row = dict[str, str]
UNITS = {"h": 3600, "min": 60, "s": 1}


def promised(output: str) -> tuple[int, int]:
    """The epochs and the seconds that a recipe has printed."""
    found = re.search(r"length (\d+) epochs?.*?: about (.*?) on ", " ".join(output.split()))
    assert found, output
    parts = re.findall(r"(\d+) (h|min|s)\b", found[2])
    return int(found[1]), sum(int(count) * UNITS[unit] for count, unit in parts)


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
        self.lock = threading.Lock()
        self.done: dict[tuple[str, ...], Row] = {}
        if self.rows.exists():
            with self.rows.open(newline="") as file:
                self.done = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in self.keys)

    def add(self, **row: Any) -> Row:
        """Keep a row, at once."""
        cells = {name: str(row.get(name, "")) for name in self.fields}
        with self.lock:
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


@dataclass
class Bench(Rows):
    """The learners that start from nothing, on the folders.

    Args:
        cores: one for each job that runs now; None stands for all of them.
    """

    cores: queue.Queue[int | None]

    def run(self, command: Sequence[str], log: Path) -> float:
        """Seconds that a command took, whose output goes to `log`. Raises SystemExit if it failed."""
        core = self.cores.get()
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPO / "src", REPO / "benchmarks")))}
        if core is not None:
            variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            command = ["taskset", "-c", str(core), *command]
        begin = time.monotonic()
        try:
            with log.open("w") as output:
                done = subprocess.run(command, cwd=self.scratch, env=variables, stdout=output, stderr=output)
        finally:
            self.cores.put(core)
        if done.returncode:
            raise self.failed(command, log)
        return time.monotonic() - begin

    def train(self, folder: str, learner: str, seed: int) -> Path:
        """Train and note a row, if there is none. Returns the run's folder."""
        run = self.scratch / "logs" / f"{folder}-{learner.replace(' ', '-')}-{seed}"
        if (folder, learner, str(seed)) in self.done:
            return run
        settings = {"data.root": self.folders / folder, "minutes": self.minutes, "seed_everything": seed}
        settings |= {"baselines": "false", "run_name": run.name, "trainer.enable_progress_bar": "false"}
        settings |= (RIVALS | STEMS).get(learner, {})
        command = [sys.executable, "-m", "cait", "fit", *(f"--{name}={value}" for name, value in settings.items())]
        log = self.scratch / f"{run.name}.txt"
        took = self.run(command, log)
        with (run / "metrics.csv").open() as file:
            last = [row for row in csv.DictReader(file) if row.get("val/acc1")][-1]
        epochs, told = promised(log.read_text())
        row = dict(folder=folder, learner=learner, seed=seed, epochs=epochs, told=told, seconds=f"{took:.1f}")
        self.add(**row, **{name: f"{float(last[f'val/{name}']):.2f}" for name in ("acc1", "acc1_macro")})
        return run

    def regress(self, folder: str, run: Path) -> None:
        """Note the row of logistic regression on the pixels that the recipe took in `run`, if there is none."""
        if (folder, REGRESSION, "0") in self.done:
            return
        if not run.is_dir():
            raise SystemExit(f"the run of {folder} is gone: remove the row of {RECIPE}, seed 0, from {self.rows}")
        settings, log = self.scratch / f"{folder}.json", self.scratch / f"{folder}.txt"
        settings.write_text(json.dumps(saved.data_settings(run)))
        took = self.run([sys.executable, str(Path(__file__).absolute()), "--regress", str(settings)], log)
        found = json.loads(log.read_text().splitlines()[-1])
        scores = {name: f"{value:.2f}" for name, value in found.items()}
        self.add(folder=folder, learner=REGRESSION, seed=0, seconds=f"{took:.1f}", **scores)

    def score(self, folder: str, learner: str, seed: int) -> None:
        run = self.train(folder, learner, seed)
        if learner == RECIPE and seed == 0:
            self.regress(folder, run)


def regress(settings: Path) -> dict[str, float]:
    """Accuracies of logistic regression on all images and pixels that these settings of the data give."""
    from cait.data.datamodule import ImageNetDataModule
    from cait.extras import probes
    from cait.extras.extract import extract

    data = ImageNetDataModule(**json.loads(settings.read_text()))
    data.setup()
    cpu, network = torch.device("cpu"), cnn(data.img_size, data.num_classes)  # its features are not used
    sets = data.train_images.samples, data.val_images.samples
    train, val = (extract(network, samples, data, cpu, pixels=True) for samples in sets)
    answers, _ = probes.on_pixels(train, val, data.num_classes, sys.maxsize)
    return probes.accuracies(answers, val.labels)


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


def punctuality(done: Sequence[Row]) -> str:
    """How far the times that the runs took are from those that they had printed."""
    off = [100 * (float(row["seconds"]) / float(row["told"]) - 1) for row in done if row["told"]]
    within = sum(abs(share) <= 15 for share in off)
    return f"{within} of {len(off)} runs took within 15 % of what they said; the furthest {max(off, key=abs):+.0f} %."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, nargs="?", metavar="FOLDERS")
    parser.add_argument("--folders", nargs="+", default=JUDGES, metavar="NAME")
    parser.add_argument("--learners", nargs="+", default=(RECIPE, *RIVALS), choices=(RECIPE, *RIVALS, *STEMS))
    parser.add_argument("--minutes", type=float, default=3, help="of a run, from the command to its end")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on one core")
    parser.add_argument("--rows", type=Path, default=REPO / "benchmarks/rivals.csv", help="the finished runs")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--regress", type=Path, help=argparse.SUPPRESS)  # in a process of its own, on its core
    given = parser.parse_args()
    if given.regress:
        print(json.dumps(regress(given.regress)))
        return
    if given.root is None:
        parser.error("where are the folders? make them with benchmarks/folders.py")
    if missing := [name for name in given.folders if not (given.root / name / "train").is_dir()]:
        parser.error(f"{given.root} has no folder {', '.join(missing)}; make it with benchmarks/folders.py")
    free = sorted(os.sched_getaffinity(0))
    if not 1 <= given.jobs <= len(free):
        parser.error(f"--jobs must be from 1 to {len(free)}, the cores here")
    cores: queue.Queue[int | None] = queue.Queue()
    for core in free[: given.jobs] if given.jobs > 1 else [None]:
        cores.put(core)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(given.root.absolute(), Path(scratch), given.rows.absolute(), given.minutes, cores)
        with ThreadPoolExecutor(given.jobs) as pool:
            work = [
                pool.submit(bench.score, folder, learner, seed)
                for seed in range(given.seeds)
                for folder in given.folders
                for learner in given.learners
            ]
            try:
                for job in work:
                    job.result()
            except BaseException:  # what runs now ends first
                pool.shutdown(cancel_futures=True)
                raise
    side = f"{given.jobs} runs side by side, each on one core" if given.jobs > 1 else "one run at a time"
    lines = [
        "# The recipe for a folder beside other learners, in equal time",
        "",
        f"`python benchmarks/rivals.py FOLDERS --minutes {given.minutes:g} --seeds {given.seeds} --jobs {given.jobs}`, "
        f"{stamp()}, timm {timm.__version__}, {side}.",
        "",
        f"val/acc1 after the last epoch, the mean of {given.seeds} seeds and their standard deviation; in brackets the",
        "seconds from the command to its end. The regression has no seed and takes its time.",
        "",
        *table(list(bench.done.values()), given.folders),
        "",
        f"Told and taken: {punctuality(list(bench.done.values()))}",
    ]
    show(lines, given.out)


if __name__ == "__main__":
    main()
