"""Learners that start from the same weights, in equal time of the clock.

    python benchmarks/pretrained.py FOLDERS FILE [--learners ours probe fastai=PYTHON timm=TRAIN.PY NAME=TREE]

FOLDERS is where benchmarks/folders.py has put its folders, FILE a state dict of timm's network. The learners are

- ours: `cait fit --data.root DIR --model.name timm/NAME --minutes M`, FILE in the cache as if the hub had sent it;
- NAME=TREE: from a checkout TREE, with `--from FILE`, which does not race; and scratch=TREE: with `--from none`;
- probe: logistic regression on standardized features at 128 pixels, C = .1, once, in whatever time it takes;
- fastai, by a PYTHON that has it: `vision_learner` and `fine_tune` at 128 pixels, with `aug_transforms`;
- timm's TRAIN.PY, which no wheel holds: AdamW at 3e-4, 128 pixels, warm-up of a quarter of the epochs and 5 at most.

Shorter runs that do not count find how many epochs of fastai and of timm fit the minutes. Each learner is scored by
its best epoch. A finished run is a row of the CSV file, with the seconds of all cores that it had, and not done again.
"""

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from report import REPO, show, stamp
from rivals import Row, Rows, spread, table
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cait.data.datamodule import ImageNetDataModule

FOLDERS = ("stamps", "solar", "tiles", "emoji-google", "surfaces", "icons")
KEYS = ("folder", "learner", "minutes", "network", "seed")  # the cells that tell a run from others
FOUND = ("epochs", "seconds", "processor", "first", "step0", "acc1", "acc1_macro", "last")
# the mean and the deviation are those of the networks of tf_efficientnet_lite
SIZE, HALF = (
    128,
    (0.5, 0.5, 0.5),
)
Scores = dict[str, Any]


def lines(path: Path) -> list[Row]:
    """The rows of a CSV file, none if it is not there yet. A header that comes again is no row."""
    text = path.read_text().splitlines() if path.exists() else []
    return [row for row in csv.DictReader(text) if row.keys() != set(row.values())]


def accuracies(labels: Any, answers: Any) -> Scores:
    """Top-1 and the mean of the classes, in percent."""
    return {
        "acc1": 100 * accuracy_score(labels, answers),
        "acc1_macro": 100 * balanced_accuracy_score(labels, answers),
    }


@dataclass
class Trials(Rows):
    """The runs of the learners; `places` are what follows their names, this checkout if nothing does."""

    network: str
    weights: Path
    places: dict[str, Path]
    fields, keys = (*KEYS, *FOUND), KEYS

    def timed(
        self, words: Sequence[Any], count: Callable[[], int] = int, tree: Path = REPO
    ) -> Scores:
        """Seconds that a command took of the clock and of the cores, and those at each validation in `count`."""
        command, log, seen = list(map(str, words)), self.scratch / "log.txt", list[float]()
        variables = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{REPO / 'benchmarks'}"}
        variables |= {"HF_HUB_CACHE": str(self.scratch / "hub")}
        begin, used = time.monotonic(), sum(os.times()[2:4])
        with log.open("w") as output:
            running = subprocess.Popen(
                command, cwd=self.scratch, env=variables, stdout=output, stderr=output
            )
            while running.poll() is None:
                seen += [time.monotonic() - begin] * (count() - len(seen))
                time.sleep(0.05)
        if running.returncode:
            raise self.failed(command, log)
        took = {"seconds": time.monotonic() - begin, "processor": sum(os.times()[2:4]) - used}
        return took | (
            {"first": seen[0], "pace": (seen[-1] - seen[0]) / max(1, len(seen) - 1)} if seen else {}
        )

    def ours(self, row: Row, root: Path, out: Path) -> Scores:
        run, cait, tree = (
            self.scratch / "logs" / out.name,
            [sys.executable, "-m", "cait"],
            self.places[row["learner"]],
        )
        best = run / "checkpoints/best.ckpt"
        own = {"model.name": f"timm/{self.network}"}
        start = {"ours": own, "scratch": {"from": "none"}}.get(
            row["learner"], own | {"from": self.weights}
        )
        start |= {"minutes": self.minutes, "seed_everything": row["seed"]}
        asked = {"data.root": root, "run_name": run.name} | start
        found = self.timed(
            [*cait, "fit", *(f"--{name}={value}" for name, value in asked.items())],
            best.exists,
            tree,
        )
        asked = {"config": run / "config.yaml", "ckpt_path": best, "output": out / "scores.json"}
        self.timed(
            [*cait, "eval", *(f"--{name}={value}" for name, value in asked.items())], tree=tree
        )
        seen = [line for line in lines(run / "metrics.csv") if line.get("val/acc1")]
        found |= {"last": seen[-1]["val/acc1"], "epochs": 1 + int(float(seen[-1]["epoch"]))}
        found |= {"step0": seen[0]["val/acc1"]} if seen[0]["step"] == "0" else {}
        scores = json.loads((out / "scores.json").read_text())
        return found | (scores.get("ema") or scores["raw"])

    def probe(self, row: Row, root: Path, out: Path) -> Scores:
        begin, model = (
            time.monotonic(),
            timm.create_model(self.network, checkpoint_path=self.weights).eval(),
        )
        looks = dict(crop_pct=0.875, mean=HALF, std=HALF, interpolation="bicubic")
        data, seen = (
            ImageNetDataModule(
                root=str(root), img_size=SIZE, num_workers=1, eval_batch_size=64, **looks
            ),
            [],
        )
        data.setup("fit")
        for samples in (data.train_images.samples, data.val_images.samples):
            data.predict_samples = samples
            with torch.inference_mode():
                parts = [
                    model.forward_head(model.forward_features(x), True)
                    for x, _ in data.predict_dataloader()
                ]
            seen.append(torch.cat(parts).numpy())
        head = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=3000))
        answers = head.fit(seen[0], data.train_images.samples.labels).predict(seen[1])
        return accuracies(data.val_images.samples.labels, answers) | {
            "seconds": time.monotonic() - begin
        }

    def fitted(
        self, row: Row, out: Path, run: Callable[[int, Path], Scores]
    ) -> tuple[Scores, Path]:
        """Run as many epochs as fit the minutes: those of an earlier seed, else as many more as a run left time for."""
        same = [
            done["epochs"] for key, done in self.done.items() if key[:-1] == self._key(row)[:-1]
        ]
        epochs = int(same[0]) if same else 2
        found = run(epochs, out / f"{epochs}")
        while (
            not same
            and (left := 60 * self.minutes - found["seconds"]) > 6 * self.minutes + found["pace"]
        ):
            epochs += int(left / found["pace"])
            found = run(epochs, out / f"{epochs}")
        return found | {"epochs": epochs}, out / f"{epochs}"

    def fastai(self, row: Row, root: Path, out: Path) -> Scores:
        def run(epochs: int, place: Path) -> Scores:
            place.mkdir()
            call = [
                self.places["fastai"],
                Path(__file__).absolute(),
                "--child",
                self.network,
                self.weights,
            ]
            return self.timed(
                [*call, root, place, epochs, row["seed"]], lambda: len(lines(place / "history.csv"))
            )

        found, place = self.fitted(row, out, run)
        both = [
            (line["accuracy"], line["balanced_accuracy_score"])
            for line in lines(place / "history.csv")
        ]
        best = max(both, key=lambda scores: float(scores[0]))
        scores = zip(FOUND[-3:], (*best, both[-1][0]), strict=True)
        return found | {name: 100 * float(score) for name, score in scores}

    def timm(self, row: Row, root: Path, out: Path) -> Scores:
        classes = sum(path.is_dir() for path in (root / "train").iterdir())

        def run(epochs: int, place: Path) -> Scores:
            asked = {
                "data-dir": root,
                "train-split": "train",
                "val-split": "val",
                "num-classes": classes,
            }
            asked |= {
                "model": self.network,
                "pretrained-path": self.weights,
                "img-size": SIZE,
                "device": "cpu",
            }
            asked |= {
                "opt": "adamw",
                "lr": 3e-4,
                "epochs": epochs,
                "warmup-epochs": min(5, epochs // 4),
            }
            asked |= {"seed": row["seed"], "output": place.parent, "experiment": place.name}
            words = ["--pretrained", *(f"--{name}={value}" for name, value in asked.items())]
            return self.timed(
                [sys.executable, self.places["timm"], *words],
                lambda: len(lines(place / "summary.csv")),
            )

        found, place = self.fitted(row, out, run)
        found["last"] = lines(place / "summary.csv")[-1]["eval_top1"]
        best = timm.create_model(
            self.network, checkpoint_path=place / "model_best.pth.tar", num_classes=classes
        )
        looks = timm.data.resolve_data_config({"img_size": SIZE}, model=best)
        images = timm.data.create_dataset("", root, split="val")
        with torch.inference_mode():  # because the script does not print the mean of the classes
            batches = timm.data.create_loader(images, batch_size=64, use_prefetcher=False, **looks)
            answers = [(labels, best.eval()(x).argmax(1)) for x, labels in batches]
        return found | accuracies(*map(torch.cat, zip(*answers, strict=True)))

    def score(self, folder: str, learner: str, seed: int) -> None:
        """Run and note a row, if there is none."""
        row = dict(
            zip(KEYS, (folder, learner, f"{self.minutes:g}", self.network, str(seed)), strict=True)
        )
        if self._key(row) not in self.done and not (learner == "probe" and seed):
            (out := self.scratch / f"{folder}-{learner}-{seed}").mkdir()
            others = {"probe": self.probe, "fastai": self.fastai, "timm": self.timm}
            found = others.get(learner, self.ours)(row, self.folders / folder, out)
            self.add(
                **row, **{name: f"{float(found[name]):.6g}" for name in FOUND if name in found}
            )


def fastai(network: str, weights: str, root: str, out: str, epochs: str, seed: str) -> None:
    """In a process of its own, by the Python that has it."""
    from fastai.vision import all as fast

    fast.set_seed(int(seed))
    looks = [*fast.aug_transforms(), fast.Normalize.from_stats(HALF, HALF, cuda=False)]
    sets = dict(train="train", valid="val", item_tfms=fast.Resize(SIZE), batch_tfms=looks)
    data, asked = (
        fast.ImageDataLoaders.from_folder(root, **sets),
        [fast.accuracy, fast.BalancedAccuracy()],
    )
    learn = fast.vision_learner(data, network, pretrained=False, metrics=asked, path=out)
    # all but the head of 1000 classes
    learn.model[0].model.load_state_dict(torch.load(weights), strict=False)
    learn.fine_tune(int(epochs), cbs=fast.CSVLogger(append=True))


def classes(rows: Sequence[Row]) -> str:
    """The mean of the classes, and top-1 before the first step of a run that was validated there."""
    means, starts = (
        [float(row[name]) for row in rows if row[name]] for name in ("acc1_macro", "step0")
    )
    return spread(means) + (f"; step 0: {spread(starts)}" if starts else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, metavar="FOLDERS")
    parser.add_argument("weights", type=Path, metavar="FILE")
    parser.add_argument("--network", default="tf_efficientnet_lite0", help="its name in timm")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, metavar="NAME")
    parser.add_argument("--learners", nargs="+", default=["ours", "probe"], metavar="NAME")
    parser.add_argument(
        "--minutes", type=float, default=3, help="of a run, from the command to its end"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rows", type=Path, default=REPO / "benchmarks/pretrained.csv", help="the finished runs"
    )
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    given = parser.parse_args()
    if bare := {"fastai", "timm", "before"} & set(given.learners):
        parser.error(f"where is it? {min(bare)}=PATH")
    places = {
        name: Path(*place or [REPO]).absolute()
        for name, *place in (w.split("=") for w in given.learners)
    }
    with tempfile.TemporaryDirectory() as scratch:
        known = given.root.absolute(), Path(scratch), given.rows.absolute(), given.minutes
        place = Path(
            scratch,
            "hub",
            f"models--{timm.get_pretrained_cfg(given.network).hf_hub_id.replace('/', '--')}",
        )
        (place / "snapshots/a").mkdir(parents=True)
        state = {name: weight.contiguous() for name, weight in torch.load(given.weights).items()}
        save_file(state, place / "snapshots/a/model.safetensors")
        (place / "refs").mkdir()
        (place / "refs/main").write_text("a")
        trials = Trials(*known, given.network, given.weights.absolute(), places)
        for seed, folder, learner in itertools.product(range(given.seeds), given.folders, places):
            trials.score(folder, learner, seed)
    told = f"{given.minutes:g}", given.network
    rows = [row for row in trials.done.values() if (row["minutes"], row["network"]) == told]
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    said = [
        "# Learners that start from the same weights, in equal time",
        "",
        f"{given.network}, {given.minutes:g} minutes a run, seeds {seeds}, {stamp()},",
        f"timm {timm.__version__}.",
        "",
        "Top-1 of the best epoch and in brackets the mean of the classes, means ± standard deviation over seeds. The",
        "best epoch of ours is chosen by the mean of the classes where one has three times the images of another.",
        "The probe is solved once. fastai and timm drop the alpha channel; the others show transparent parts on white.",
        "",
        *table(rows, given.folders, sorted({row["learner"] for row in rows}), classes),
    ]
    show(said, given.out)


if __name__ == "__main__":
    fastai(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
