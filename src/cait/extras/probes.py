"""What simple classifiers of scikit-learn make of the images that a run trains on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from cait.extras.extract import Extracted, evenly

WORK = 400_000_000
"""Most images × values of each × classes (10 or more) of a regression: about 20 seconds of a core, and 160 MB."""
NEIGHBOURS = 20
Answers = tuple[np.ndarray, str]
"""The answers to the images to score on, and how they were found."""


def chance(train: Extracted, val: Extracted, classes: int) -> Answers:
    most = np.bincount(train.labels, minlength=classes).argmax()
    return np.full(len(val.labels), most), "always the class with the most training images"


def on_pixels(train: Extracted, val: Extracted, classes: int, work: float = WORK) -> Answers:
    """Logistic regression on the pixels; of grey images on one channel."""
    is_grey = all((each.pixels == each.pixels[:, :1]).all() for each in (train, val))
    rows, val_rows = (each.pixels[:, : 1 if is_grey else 3].reshape(len(each.labels), -1) for each in (train, val))
    answers, of_all = regression(rows, val_rows, train.labels, classes, work)
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


def scores(train: Extracted, val: Extracted, classes: int) -> Iterator[dict[str, Any]]:
    """For each classifier its name, how it answers, its accuracies in per cent, and the seconds it took."""
    for name, answer in ANSWERS.items():
        begin = time.monotonic()
        answers, how = answer(train, val, classes)
        seconds = round(time.monotonic() - begin, 2)
        yield {"name": name, "how": how, **accuracies(answers, val.labels), "seconds": seconds}


def regression(rows: np.ndarray, val_rows: np.ndarray, labels: np.ndarray, classes: int, work: float = WORK) -> Answers:
    """The answers of a logistic regression on standardised rows [N, P] to other rows, and of how many it has seen."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    kept = evenly(len(rows), max(2 * classes, int(work // (rows.shape[1] * max(10, classes)))))
    with warnings.catch_warnings(), threadpool_limits(1):  # on a busy machine threads wait for each other
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its passes
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
        model.fit(rows[kept].astype(np.float32), labels[kept])
    of_all = f" of {len(kept):,} of {len(rows):,} images" if len(kept) < len(rows) else ""
    return model.predict(val_rows.astype(np.float32)), of_all


def accuracies(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-1 accuracy and its mean over the classes that have images, in per cent, as a run logs them."""
    from sklearn.metrics import recall_score

    macro = recall_score(labels, answers, labels=np.unique(labels), average="macro", zero_division=0)
    return {"acc1": 100 * float(np.mean(answers == labels)), "acc1_macro": 100 * float(macro)}
