"""The baselines of a run: simple classifiers, scored after training and kept in baselines.json, and what follows."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer

from cait import disk
from cait.data.dataset import NO_LABEL
from cait.errors import one_line, to_type
from cait.extras.pretrained.extract import Extracted, evenly, extract
from cait.model.config import TIMM, VARIANTS
from cait.plugins import Results, Run
from cait.run.checkpoints import BestCheckpoint, LastCheckpoint
from cait.run.rundir import CONFIG

FILE = "baselines.json"
MOST = 10_000
"""Images that are read of each set."""
WORK, ITERATIONS = 400_000_000, 200
"""Bounds of a regression: images × values of each × classes (10 or more), and passes over them. Together about 20
seconds of a core, and 160 MB."""
NEIGHBOURS = 20
LONGER = 10
"""Minutes that a run gets next whose baselines are better, if it was shorter."""
SHOWN = 0.01
"""Points that the table tells apart; a run logs its accuracy in float32."""
NAMES = {"acc1": "top-1", "acc1_macro": "mean of the classes"}
NUMBER: Any = (int, float)
ROW = {"name": str, "how": str, "seconds": NUMBER, "score": NUMBER}
SHAPE = {"metric": str, "run": NUMBER, "how": str, "baselines": [ROW]}
Scores = dict[str, Any]
Answers = tuple[np.ndarray, str]
"""The answers to the images to score on, and how they were found."""


class Baselines(Callback):
    """Writes the file when a run of one process has ended as planned; a failure is one line on the screen.

    Everything of the run is saved by then, so that nothing of it can change.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Score. Lightning does not call this after an exception or a signal."""
        if stage != "fit" or trainer.world_size > 1 or "val/acc1" not in trainer.callback_metrics:
            return
        file = self.run.folder / FILE
        try:
            file.unlink(missing_ok=True)  # from before the run went on
            print(f"scoring baselines on up to {MOST:,} images a set; --baselines false leaves this out", flush=True)
            scored = self._scored(trainer, pl_module)
            with disk.whole(file) as beside:
                beside.write_text(json.dumps(scored, indent=1) + "\n", encoding="utf-8")
        except (Exception, KeyboardInterrupt) as error:
            print(f"no baselines: {one_line(error) or type(error).__name__}", flush=True)

    def _scored(self, trainer: Trainer, pl_module: Any) -> Scores:
        data, device = self.run.data, trainer.strategy.root_device
        sets = data.train_images.samples, data.val_images.samples
        found = [extract(pl_module.model, each, data, device, evenly(len(each), MOST), pixels=True) for each in sets]
        train, val = (each.at(each.labels != NO_LABEL) for each in found)
        saves = [each for each in trainer.checkpoint_callbacks if isinstance(each, LastCheckpoint)]
        metric, accuracy, whose = _of_run(trainer)
        rows = []
        for name, answer in ANSWERS.items():
            if any(each.signals.received for each in saves):  # its handlers only note a signal until the end
                raise KeyboardInterrupt("the run is to stop")
            begin = time.monotonic()
            answers, how = answer(train, val, data.num_classes)
            seconds, scores = round(time.monotonic() - begin, 2), accuracies(answers, val.labels)
            rows.append({"name": name, "how": how, **scores, "seconds": seconds, "score": scores[metric]})
        return {"metric": NAMES[metric], "run": accuracy, "how": whose, "baselines": rows}


def _of_run(trainer: Trainer) -> tuple[str, float, str]:
    """The accuracy that the run is judged by, its value, and whose it is."""
    for callback in trainer.checkpoint_callbacks:
        metric = getattr(callback, "metric", "").removeprefix("val/")
        if metric in NAMES and isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
            return metric, float(callback.best_model_score), "its best.ckpt"
    return "acc1", float(trainer.callback_metrics["val/acc1"]), "its last weights"


def chance(train: Extracted, val: Extracted, classes: int) -> Answers:
    most = np.bincount(train.labels, minlength=classes).argmax()
    return np.full(len(val.labels), most), "always the class with the most training images"


def on_pixels(train: Extracted, val: Extracted, classes: int, work: float = WORK, passes: int = ITERATIONS) -> Answers:
    """Logistic regression on the pixels; of grey images on one channel."""
    is_grey = all((each.pixels == each.pixels[:, :1]).all() for each in (train, val))
    rows, val_rows = (each.pixels[:, : 1 if is_grey else 3] for each in (train, val))
    answers, of_all = regression(rows, val_rows, train.labels, classes, work, passes)
    return answers, f"scikit-learn, on the pixels{of_all}"


def linear_probe(train: Extracted, val: Extracted, classes: int) -> Answers:
    answers, of_all = regression(train.features, val.features, train.labels, classes)
    return answers, f"logistic regression on the network's features{of_all}"


def neighbours(train: Extracted, val: Extracted, classes: int) -> Answers:
    """The training images whose features have the nearest cosine: a tenth of those of a class, at most NEIGHBOURS."""
    from sklearn.neighbors import KNeighborsClassifier

    k = min(NEIGHBOURS, max(1, len(train.labels) // (10 * classes)))
    model = KNeighborsClassifier(k, weights="distance", metric="cosine").fit(train.features, train.labels)
    return model.predict(val.features), f"{k} of the network's features"


ANSWERS = {
    **{"chance": chance, "logistic regression": on_pixels},
    **{"nearest neighbours": neighbours, "linear probe": linear_probe},
}


def regression(
    rows: np.ndarray, others: np.ndarray, labels: np.ndarray, classes: int, work: float = WORK, passes: int = ITERATIONS
) -> Answers:
    """The answers of a logistic regression on standardised rows [N, ...] to others, and of how many it has seen."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    rows, others = rows.reshape(len(rows), -1), others.reshape(len(others), -1)
    kept = evenly(len(rows), max(2 * classes, int(work // (rows.shape[1] * max(10, classes)))))
    with warnings.catch_warnings(), threadpool_limits(1):  # on a busy machine threads wait for each other
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its passes
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=passes))
        model.fit(rows[kept].astype(np.float32), labels[kept])
    of_all = f" of {len(kept):,} of {len(rows):,} images" if len(kept) < len(rows) else ""
    return model.predict(others.astype(np.float32)), of_all


def accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 accuracy and its mean over the classes that have images, in per cent, as a run logs them."""
    from sklearn.metrics import recall_score

    macro = recall_score(labels, answers, labels=np.unique(labels), average="macro", zero_division=0)
    return {"acc1": 100 * float(np.mean(answers == labels)), "acc1_macro": 100 * float(macro)}


def read(folder: Path) -> Scores | None:
    """What the file holds; None if it is not there, UserError if it is damaged."""
    try:
        return disk.read_json(folder / FILE, SHAPE, folder)
    except OSError:
        return None


def table(found: Scores) -> Results:
    """The run and its baselines, the best first."""
    entries = [("this run", found["how"], found["run"])]
    entries += [(row["name"], f"{row['how']}, {row['seconds']:.1f} s", row["score"]) for row in found["baselines"]]
    entries.sort(key=lambda entry: -entry[2])
    better, points = entries[0][0], entries[0][2] - found["run"]
    note = f"{better}: {points:.2f} points better than this run" if points >= SHOWN else ""
    rows = [(name, how, f"{score:.2f} %") for name, how, score in entries]
    return Results("Baselines", ("", "how", found["metric"]), rows, note)


def suggestions(run: Run) -> list[tuple[str, str]]:
    """If a baseline is better than the run: the same from weights if it started from none, then more minutes."""
    found, start, name = read(run.folder), run.module.initial_weights, run.module.name
    if not found or not table(found).note or run.program.script:  # its classes have no recipe
        return []
    source = start.weights or ("timm" if start.pretrained else "")
    named = f"--model.name {name}" if name not in VARIANTS or start.weights else ""
    tries = [("timm", named)] if not source and (name in VARIANTS or name.startswith(TIMM)) else []
    if time.time() - (run.folder / CONFIG).stat().st_mtime < 60 * LONGER:
        tries.append((source, f"{named} --minutes {LONGER}".strip()))
    return [("try", _command(str(run.data.root), *each)) for each in tries]


def _command(root: str, source: str, options: str) -> str:
    make, cait = f"make train DATA={shlex.quote(root)}", f"cait fit --data.root {shlex.quote(root)}"
    if source:
        make, cait = f"{make} FROM={shlex.quote(source)}", f"{cait} --from {shlex.quote(source)}"
    if options:
        make, cait = f'{make} ARGS="{options}"', f"{cait} {options}"
    return to_type(make, cait)
