"""The baselines of a run: simple classifiers, scored after training, and what follows from them."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer

from cait import disk
from cait.data.dataset import NO_LABEL
from cait.errors import UserError, one_line, to_type
from cait.extras.features import Extracted, classify, evenly, extract
from cait.extras.pretrained.solve import SolveHead
from cait.plugins import Results, Run
from cait.run.checkpoints import BestCheckpoint, LastCheckpoint

FILE = "baselines.json"
MOST = 10_000
"""Images that are read of each set."""
SHOWN = 0.01
"""Points that the table tells apart; a run logs its accuracy in float32."""
NAMES = {"acc1": "top-1", "acc1_macro": "mean of the classes"}
NUMBER: Any = (int, float)
ROW = {"name": str, "how": str, "seconds": NUMBER, "score": NUMBER}
SHAPE = {"metric": str, "run": NUMBER, "how": str, "baselines": [ROW]}
Scores = dict[str, Any]


class Baselines(Callback):
    """Writes the file when a run of one process has ended as planned; a failure is one line on the screen.

    Everything of the run is saved by then, so that nothing of it can change.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Score. Lightning does not call this after an exception or a signal."""
        score = float(trainer.callback_metrics.get("val/acc1", math.nan))
        if stage != "fit" or trainer.world_size > 1 or math.isnan(score):
            return
        file = self.run.folder / FILE
        try:
            file.unlink(missing_ok=True)  # from before the run went on
            self._score(trainer, pl_module, file)
        except (Exception, KeyboardInterrupt) as error:
            print(f"no baselines: {one_line(error) or type(error).__name__}", flush=True)

    def suggestions(self) -> list[tuple[str, str]]:
        """What the summary says that one may add to the command, if a baseline is better than the run."""
        table = results(self.run.folder)
        start = self.run.module.settings
        if not table or not table.note or self.run.program.script:  # its classes have no recipe
            return []
        tries = [("try", "more time: " + to_type('ARGS="--minutes 10"', "--minutes 10"))]
        if not start.weights and not start.pretrained:
            tries.insert(0, ("try", "published weights: " + to_type("FROM=timm", "--from timm")))
        return tries

    def _score(self, trainer: Trainer, pl_module: Any, file: Path) -> None:
        data = self.run.data
        device = trainer.strategy.root_device
        print("scoring simple baselines; --baselines false leaves this out", flush=True)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        solved = next(
            (callback.scores for callback in callbacks if isinstance(callback, SolveHead)), {}
        )
        sets = []
        for samples in (data.train_images.samples, data.val_images.samples):
            some = evenly(len(samples), MOST)
            seen = extract(
                pl_module.model, samples, data, device, some, pixels=True, features=not solved
            )
            sets.append(seen.at(seen.labels != NO_LABEL))
        metric, run, how = _run_score(trainer)
        if solved and not trainer.global_step:  # its solved head is all that it has learned
            how += ", a linear probe on the network's features"
            solved = {}
        rows = []
        train, val = sets
        for row in scores(train, val, data.num_classes, solved):
            rows.append(row | {"score": row[metric]})
            if any(
                isinstance(callback, LastCheckpoint) and callback.signals.received
                for callback in callbacks
            ):
                return  # a signal, which is only noted until the end
        disk.write_json(file, {"metric": NAMES[metric], "run": run, "how": how, "baselines": rows})


def _run_score(trainer: Trainer) -> tuple[str, float, str]:
    """The accuracy that the run is judged by, its value, and whose it is."""
    for callback in trainer.checkpoint_callbacks:
        metric = getattr(callback, "metric", "").rpartition("/")[2]
        if (
            metric in NAMES
            and isinstance(callback, BestCheckpoint)
            and callback.best_model_score is not None
        ):
            return metric, float(callback.best_model_score), "its best.ckpt"
    return "acc1", float(trainer.callback_metrics["val/acc1"]), "its last weights"


def scores(train: Extracted, val: Extracted, classes: int, solved: Scores) -> Iterator[Scores]:
    """For each classifier its name, how it answers, its accuracies in percent, and the seconds it took.

    Chance is the largest class of those to validate on. The linear probe is the head that was `solved` before the first
    step, by its accuracies, or is learned on the features, if there are any.
    """
    if not len(val.labels):
        raise UserError("no validation image counts")
    images = np.bincount(train.labels, minlength=classes)
    validates = np.isin(np.arange(classes), val.labels)
    largest = np.full_like(val.labels, (images * validates).argmax())
    yield dict(
        name="chance", how="the largest class", seconds=0.0, **accuracies(largest, val.labels)
    )
    if solved:
        yield dict(
            name="linear probe", how="the head solved before the first step", seconds=0.0, **solved
        )
    inputs = [("logistic regression", "on the pixels", train.pixels, val.pixels)]
    if train.features.size:
        inputs.append(
            (
                "linear probe",
                "logistic regression on the network's features",
                train.features,
                val.features,
            )
        )
    for name, how, rows, val_rows in inputs:
        begin = time.monotonic()
        answers = classify(rows, train.labels, val_rows, classes)
        seconds = round(time.monotonic() - begin, 2)
        yield dict(name=name, how=how, seconds=seconds, **accuracies(answers, val.labels))


def accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 accuracy and its mean over the classes that have images, in percent, as a run logs them."""
    of_classes = [np.mean(answers[labels == label] == label) for label in np.unique(labels)]
    return {
        "acc1": 100 * float(np.mean(answers == labels)),
        "acc1_macro": 100 * float(np.mean(of_classes)),
    }


def results(folder: Path) -> Results | None:
    """The run and its baselines, the best first; None if there are none, UserError if the file is damaged."""
    try:
        table = disk.read_json(folder / FILE, SHAPE)
    except OSError:
        return None
    entries = [("this run", table["how"], table["run"])]
    for row in table["baselines"]:
        time_taken = f", {row['seconds']:.1f} s" if row["seconds"] else ""
        entries.append((row["name"], row["how"] + time_taken, row["score"]))
    entries.sort(key=lambda entry: -entry[2])
    better, _, best = entries[0]
    points = best - table["run"]
    note = f"{better}: {points:.2f} points better than this run" if points >= SHOWN else ""
    rows = [(name, how, f"{score:.2f} %") for name, how, score in entries]
    return Results("Baselines", ("", "how", table["metric"]), rows, note)
