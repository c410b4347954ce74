"""The same recipe, through timm's train.py and through `cait fit`, over several seeds: how far apart are they?

    python benchmarks/seeds.py FOLDERS TRAIN.PY FILE [--seeds 10] [--tasks scratch tuned]

FOLDERS is where benchmarks/folders.py has put `fashion-10k` and `lower`, TRAIN.PY timm's script, FILE a state dict of
tf_efficientnet_lite0. Both trainers take the same network, images, batch, rates, schedule, losses and augmentation, and
the accuracy after the last epoch. Their random numbers differ, so single runs differ: the mean of the differences and
its 95 % interval say whether the trainers do. A finished run is a row of the CSV file, and not done again.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import timm
import yaml
from report import REPO, show, stamp
from rivals import Rows
from scipy.stats import t as student

Settings = dict[str, Any]


@dataclass
class Task:
    """What is trained; `ours` and `timms` say it in the words of each trainer, beside what all tasks share."""

    title: str
    folder: str
    epochs: int
    batch_size: int
    img_size: int
    lr: float
    ours: Settings
    timms: list[str]


SMALL_CAIT = dict(patch_size=7, embed_dim=64, depth=4, num_heads=2)
TASKS = {
    "scratch": Task(
        title="a small CaiT from random weights, on Fashion-MNIST",
        folder="fashion-10k",
        epochs=10,
        batch_size=64,
        img_size=28,
        lr=2e-3,
        ours={
            "model": {"name": "xxs24", "fields": SMALL_CAIT},
            "data": {"mixup": 0.2, "cutmix": 1.0, "mix_prob": 0.2},
        },
        timms=[
            "--model=cait_xxs24_224",
            "--mixup=0.2",
            "--cutmix=1.0",
            "--mixup-prob=0.2",
            "--model-kwargs",
            "img_size=28",
            "init_values=0.1",  # the paper's for so few blocks, which is this repository's default
            *(f"{name}={value}" for name, value in SMALL_CAIT.items()),
        ],
    ),
    "tuned": Task(
        title="tf_efficientnet_lite0 from its published weights, on small letters",
        folder="lower",
        epochs=3,
        batch_size=32,
        img_size=64,
        lr=3e-4,
        ours={
            "model": {"name": "timm/tf_efficientnet_lite0", "fields": None, "weights": "FILE"},
            "data": {"mixup": 0, "cutmix": 0, "mean": [0.5] * 3, "std": [0.5] * 3},
        },
        timms=[
            "--model=tf_efficientnet_lite0",
            "--pretrained",
            "--pretrained-path=FILE",
            "--mean",
            *["0.5"] * 3,
            "--std",
            *["0.5"] * 3,
        ],
    ),
}


@dataclass
class Trials(Rows):
    """The runs of both trainers."""

    script: Path
    weights: Path
    fields: ClassVar[tuple[str, ...]] = ("task", "trainer", "seed", "acc1", "seconds")
    keys: ClassVar[tuple[str, ...]] = ("task", "trainer", "seed")

    def run(self, task: str, trainer: str, seed: int) -> None:
        """Train, and note the accuracy after the last epoch, unless that has been done."""
        row = {"task": task, "trainer": trainer, "seed": str(seed)}
        if self._key(row) in self.done:
            return
        begin = time.monotonic()
        train = self.ours if trainer == "cait" else self.timms
        accuracy = train(TASKS[task], seed, self.scratch / f"{task}-{trainer}-{seed}")
        self.add(**row, acc1=f"{accuracy:.3f}", seconds=f"{time.monotonic() - begin:.0f}")

    def ours(self, task: Task, seed: int, out: Path) -> float:
        trainer = {
            "accelerator": "cpu",
            "max_epochs": task.epochs,
            "check_val_every_n_epoch": task.epochs,
        }
        model = {
            "lr": task.lr,
            "lr_base_size": None,
            "min_lr": 1e-5,
            "warmup_epochs": 1,
            "warmup_lr": 1e-6,
            "weight_decay": 0.05,
            "label_smoothing": 0.1,
            "drop_path_rate": 0.0,
        }
        data = {
            "root": str(self.folders / task.folder),
            "img_size": task.img_size,
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "backend": "timm",
            "batch_size": task.batch_size,
            "num_workers": 0,
            "repeats": 1,
            "scale": [0.7, 1.0],
            "hflip": 0.5,
            "auto_augment": None,
            "color_jitter": 0.0,
            "erase_prob": 0.0,
        }
        settings = {
            "trainer": trainer,
            "model": model | task.ours["model"],
            "data": data | task.ours["data"],
        }
        config = (
            self.scratch / "config.yaml"
        )  # without one, a recipe would be chosen for the folder
        config.write_text(yaml.safe_dump(settings).replace("FILE", str(self.weights)))
        name = f"--run_name={out.name}"
        self._call("-m", "cait", "fit", f"--config={config}", f"--seed_everything={seed}", name)
        with (self.scratch / "logs" / out.name / "metrics.csv").open(newline="") as file:
            scores = [row["val/acc1"] for row in csv.DictReader(file) if row["val/acc1"]]
        return float(scores[-1])

    def timms(self, task: Task, seed: int, out: Path) -> float:
        root = self.folders / task.folder
        classes = sum(path.is_dir() for path in (root / "train").iterdir())
        words = [
            f"--data-dir={root}",
            "--train-split=train",
            "--val-split=val",
            f"--num-classes={classes}",
            f"--img-size={task.img_size}",
            "--crop-pct=1.0",
            "--interpolation=bicubic",
            "--train-interpolation=bicubic",
            f"--batch-size={task.batch_size}",
            "--workers=0",
            "--device=cpu",
            "--opt=adamw",
            f"--lr={task.lr}",
            "--weight-decay=0.05",
            "--sched-on-updates",
            "--warmup-prefix",
            "--warmup-epochs=1",
            "--warmup-lr=1e-6",
            "--min-lr=1e-5",
            f"--epochs={task.epochs - 1}",  # those of the warm-up come on top
            f"--val-interval={task.epochs}",
            "--scale",
            "0.7",
            "1.0",
            "--color-jitter=0",
            "--smoothing=0.1",
            "--drop-path=0",
            f"--seed={seed}",
            f"--output={out.parent}",
            f"--experiment={out.name}",
            *task.timms,
        ]
        self._call(str(self.script), *words)
        with (out / "summary.csv").open(newline="") as file:
            return float([*csv.DictReader(file)][-1]["eval_top1"])

    def _call(self, *words: str) -> None:
        """Run a command of Python on one core; its output is shown if it fails."""
        command = [sys.executable, *(word.replace("FILE", str(self.weights)) for word in words)]
        log = self.scratch / "log.txt"
        variables = os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            done = subprocess.run(
                command, cwd=self.scratch, env=variables, stdout=output, stderr=output
            )
        if done.returncode:
            raise self.failed(command, log)


def interval(differences: list[float]) -> float:
    """Half the width of the 95 % interval of their mean, by Student's t."""
    count = len(differences)
    deviation = statistics.stdev(differences) / count**0.5
    return float(student.ppf(0.975, count - 1)) * deviation


def compared(trials: Trials, task: str) -> list[str]:
    """The row of a task in the table."""
    scores: dict[str, dict[str, float]] = {"cait": {}, "timm": {}}
    for row in trials.done.values():
        if row["task"] == task:
            scores[row["trainer"]][row["seed"]] = float(row["acc1"])
    seeds = sorted(scores["cait"].keys() & scores["timm"].keys(), key=int)
    if len(seeds) < 2:
        return []
    cells = []
    for trainer in ("cait", "timm"):
        values = [scores[trainer][seed] for seed in seeds]
        cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
    differences = [scores["cait"][seed] - scores["timm"][seed] for seed in seeds]
    difference = f"{statistics.mean(differences):+.2f} ± {interval(differences):.2f}"
    return [f"| {TASKS[task].title} | {len(seeds)} | {cells[0]} | {cells[1]} | {difference} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path)
    parser.add_argument("script", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--rows", type=Path, default=REPO / "benchmarks/seeds.csv")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trials = Trials(
            folders=options.folders.absolute(),
            scratch=Path(scratch),
            rows=options.rows.absolute(),
            minutes=0,
            script=options.script.absolute(),
            weights=options.weights.absolute(),
        )
        for seed in range(options.seeds):
            for task in options.tasks:
                trials.run(task, "cait", seed)
                trials.run(task, "timm", seed)
    rows = [line for task in TASKS for line in compared(trials, task)]
    lines = [
        "# timm's train.py and `cait fit`, the same recipe over several seeds",
        "",
        f"`python benchmarks/seeds.py`, {stamp()}, timm {timm.__version__}, one core a run, float32.",
        "",
        "val/acc1 after the last epoch: mean ± standard deviation over the seeds, and the mean of the differences with",
        "its 95 % interval.",
        "",
        "| task | seeds | `cait fit` | timm's train.py | difference |",
        "|---|---|---|---|---|",
        *rows,
    ]
    show(lines, options.out)


if __name__ == "__main__":
    main()
