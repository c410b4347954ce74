"""The recipe for a folder beside other learners, in equal time of the clock.

    python benchmarks/rivals.py FOLDERS [--folders NAME ...] [--seconds 180] [--seeds 3] [--jobs 1]
                                [--rows benchmarks/rivals.csv] [--out benchmarks/rivals.md]

FOLDERS is where benchmarks/folders.py has put its folders; the judge folders are the default. The learners are

- the recipe: `cait fit --data.root DIR`, with as many epochs as fit into the time;
- a CNN of three layers, timm's `resnet10t` and a small ViT, from scratch, under the same trainer with the recipe's
  settings of the data, AdamW with a warm-up and a cosine; the rate is the one of `RATES`;
- scikit-learn's logistic regression on the same pixels, once, in whatever time it takes.

Two short runs of each learner on each folder say how long its start and an epoch take. From that follows the number of
epochs that end within the time, from the command to its end. Each run is validated once, after its last epoch, and
scored by that. Each finished run is a row of the CSV file, and is not done again; remove the file to start afresh.
With --jobs 2 two runs go side by side, each pinned to one core with one thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from report import REPO, stamp
from torch import nn

from cait import disk

JUDGES = ("letters", "emoji-google", "emoji-apple", "kana", "emoji-twitter", "surfaces")
RATES = {"CNN of 3 layers": 1e-3, "resnet10t": 1e-3, "ViT": 1e-3}
RECIPE, REGRESSION = "the recipe", "logistic regression"
LEARNERS = (RECIPE, *RATES, REGRESSION)
FIELDS = ("folder", "learner", "seed", "epochs", "seconds", "acc1", "acc1_macro")
PLAN = "plan"
"""In the column of the seed: a row that says only how many epochs fit."""
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


def network(learner: str, size: int) -> dict[str, Any]:
    """The settings of the model of a rival for images of this size."""
    if learner == "ViT":
        patch = next(p for p in range(1, size + 1) if size % p == 0 and size // p <= 8)  # at most 64 tokens
        fields = dict(patch_size=patch, embed_dim=192, depth=6, num_heads=3)
        return dict(name="timm/vit_tiny_patch16_224", fields=fields)
    return dict(name="timm/resnet10t" if learner == "resnet10t" else "rivals:cnn")


@dataclass
class Bench:
    """The folders, and the rows so far.

    Args:
        cores: one for each job that runs now; None stands for all of them.
    """

    folders: Path
    scratch: Path
    rows: Path
    seconds: float
    cores: queue.Queue[int | None]

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.done: dict[tuple[str, ...], Row] = {}
        if self.rows.exists():
            with self.rows.open(newline="") as file:
                self.done = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return row["folder"], row["learner"], row["seed"]

    def add(self, **row: Any) -> Row:
        """Keep a row, at once."""
        cells = {name: str(row.get(name, "")) for name in FIELDS}
        with self.lock:
            self.done[self._key(cells)] = cells
            with disk.whole(self.rows) as beside, beside.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(self.done.values())
            print(" ".join(cells.values()), flush=True)
        return cells

    def run(self, command: Sequence[str], log: Path) -> float:
        """Seconds that a command took. Raises SystemExit if it failed."""
        core = self.cores.get()
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPO / "src", REPO / "benchmarks")))}
        if core is not None:
            variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            command = ["taskset", "-c", str(core), *command]
        begin = time.monotonic()
        try:
            with log.open("w") as output, self.errors(log).open("w") as errors:
                done = subprocess.run(command, cwd=self.scratch, env=variables, stdout=output, stderr=errors)
        finally:
            self.cores.put(core)
        if done.returncode:
            kept = self.rows.with_suffix(".failed.txt")
            kept.write_text(log.read_text() + self.errors(log).read_text())
            raise SystemExit(f"failed, see {kept}: {' '.join(map(str, command))}")
        return time.monotonic() - begin

    def errors(self, log: Path) -> Path:
        return log.with_suffix(".errors")

    def recipe(self, folder: str, learner: str) -> dict[str, Any]:
        """The settings that the recipe chooses for a folder, asked for by a learner."""
        log = self.scratch / f"{folder}-{learner}-recipe.yaml"
        self.run([sys.executable, "-m", "cait", "fit", f"--data.root={self.folders / folder}", "--print_config"], log)
        return yaml.safe_load(log.read_text())

    def command(self, folder: str, learner: str, seed: int, epochs: int, name: str) -> list[str]:
        """What trains a learner."""
        given = [f"--trainer.max_epochs={epochs}", f"--trainer.check_val_every_n_epoch={epochs}", "--baselines=false"]
        given += [f"--seed_everything={seed}", f"--run_name={name}", f"--trainer.default_root_dir={self.scratch}"]
        given += ["--trainer.enable_progress_bar=false", "--save_every_n_minutes=null"]
        if learner == RECIPE:
            return [sys.executable, "-m", "cait", "fit", f"--data.root={self.folders / folder}", *given]
        chosen = self.recipe(folder, learner)
        data = {key: value for key, value in chosen["data"].items() if key not in ("seed", "num_classes")}
        size = data["img_size"]
        model = network(learner, size) | dict(optimizer="adamw", lr=RATES[learner], lr_base_size=None, per_class=True)
        model |= dict(warmup_epochs=min(5.0, max(0.1, epochs / 10)))
        trainer = {key: chosen["trainer"][key] for key in ("precision", "log_every_n_steps", "devices")}
        config = self.scratch / f"{name}.yaml"
        config.write_text(yaml.safe_dump(dict(data=data, model=model, trainer=trainer)))
        return [sys.executable, "-m", "cait", "fit", f"--config={config}", *given]

    def train(self, folder: str, learner: str, seed: int, epochs: int, what: str) -> tuple[float, float, float]:
        """(seconds, acc1, acc1_macro) of a run, after its last epoch."""
        name = f"{folder}-{learner.replace(' ', '-')}-{what}"
        seconds = self.run(self.command(folder, learner, seed, epochs, name), self.scratch / f"{name}.txt")
        with (self.scratch / name / "metrics.csv").open() as file:
            last = [row for row in csv.DictReader(file) if row.get("val/acc1")][-1]
        return seconds, float(last["val/acc1"]), float(last["val/acc1_macro"])

    def plan(self, folder: str, learner: str) -> int:
        """How many epochs end within the time: by runs of one epoch, the better of two, and of three."""
        if row := self.done.get((folder, learner, PLAN)):
            return int(row["epochs"])
        one, again, three = (
            self.train(folder, learner, 0, epochs, f"plan{number}")[0] for number, epochs in enumerate((1, 1, 3))
        )
        one = min(one, again)
        epoch = max(0.05, (three - one) / 2)
        epochs = max(1, int((self.seconds - one) / epoch) + 1)
        self.add(folder=folder, learner=learner, seed=PLAN, epochs=epochs, seconds=f"{epoch:.2f}")
        return epochs

    def score(self, folder: str, learner: str, seeds: int) -> None:
        """Every run of a learner on a folder that is not there yet."""
        if learner == REGRESSION:
            if (folder, learner, "0") not in self.done:
                self.regress(folder)
            return
        for seed in range(seeds):
            if (folder, learner, str(seed)) not in self.done:
                epochs = self.plan(folder, learner)
                seconds, acc1, macro = self.train(folder, learner, seed, epochs, f"seed{seed}")
                scores = dict(seconds=f"{seconds:.1f}", acc1=f"{acc1:.2f}", acc1_macro=f"{macro:.2f}")
                self.add(folder=folder, learner=learner, seed=seed, epochs=epochs, **scores)

    def regress(self, folder: str) -> None:
        settings, log = self.scratch / f"{folder}.json", self.scratch / f"{folder}.txt"
        settings.write_text(json.dumps(self.recipe(folder, REGRESSION)["data"]))
        seconds = self.run([sys.executable, str(Path(__file__).absolute()), "--regress", str(settings)], log)
        found = json.loads(log.read_text().splitlines()[-1])
        scores = {name: f"{value:.2f}" for name, value in found.items()}
        self.add(folder=folder, learner=REGRESSION, seed=0, seconds=f"{seconds:.1f}", **scores)


def regress(settings: Path) -> dict[str, float]:
    """Accuracies of logistic regression on all images and pixels that these settings of the data give."""
    from cait.data.datamodule import ImageNetDataModule
    from cait.extras.baselines import scoring

    data = ImageNetDataModule(**json.loads(settings.read_text()))
    data.setup()
    cpu, most = torch.device("cpu"), sys.maxsize
    sets = [scoring.read(images.samples, data, None, cpu, most) for images in (data.train_images, data.val_images)]
    answers, _ = scoring.regression(sets[0], sets[1], data.num_classes, sys.maxsize, 1000)
    return scoring.accuracies(answers, sets[1].labels)


def table(done: Sequence[Row], folders: Sequence[str]) -> Iterator[str]:
    """A row for each learner: mean ± standard deviation of val/acc1 on each folder, and their mean."""
    yield f"| | {' | '.join(folders)} | mean |"
    yield f"|---|{'---|' * (len(folders) + 1)}"
    for learner in LEARNERS:
        cells, means = [], []
        for folder in folders:
            rows = [row for row in done if (row["folder"], row["learner"]) == (folder, learner) and row["acc1"]]
            scores = [float(row["acc1"]) for row in rows]
            if not scores:
                cells.append("")
                continue
            means.append(statistics.mean(scores))
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            time_taken = statistics.mean(float(row["seconds"]) for row in rows)
            epochs = f", {rows[0]['epochs']} epochs" if rows[0]["epochs"] else ""
            cells.append(f"**{means[-1]:.1f}**{spread} ({time_taken:.0f} s{epochs})")
        overall = f"{statistics.mean(means):.1f}" if len(means) == len(folders) else ""
        yield f"| {learner} | {' | '.join(cells)} | {overall} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, nargs="?", metavar="FOLDERS")
    parser.add_argument("--folders", nargs="+", default=JUDGES, metavar="NAME")
    parser.add_argument("--learners", nargs="+", default=LEARNERS, choices=LEARNERS)
    parser.add_argument("--seconds", type=float, default=180, help="of a run, from the command to its end")
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
        bench = Bench(given.root.absolute(), Path(scratch), given.rows.absolute(), given.seconds, cores)
        with ThreadPoolExecutor(given.jobs) as pool:
            work = [
                pool.submit(bench.score, folder, learner, given.seeds)
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
        f"`python benchmarks/rivals.py FOLDERS --seconds {given.seconds:g} --seeds {given.seeds} --jobs {given.jobs}`, "
        f"{stamp()}, timm {timm.__version__}, {side}.",
        "",
        f"val/acc1 after the last epoch, the mean of {given.seeds} seeds and their standard deviation; in brackets the",
        "seconds from the command to its end, and the epochs. The regression has no seed and takes its time.",
        "",
        *table(list(bench.done.values()), given.folders),
    ]
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
