"""The recipe that is chosen for a folder, beside scikit-learn's logistic regression on the same pixels.

    python -m cait.extras.recipe.benchmark DIR [DIR ...] --seeds 3

Each run is `cait fit --data.root DIR`, as a user types it. It is scored by its last epoch: no choice has seen the
validation images. The regression gets the validation transform's pixels of the same images at the same size,
standardised by their training mean and deviation; of grey folders one channel. It prints a row of a table a folder.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import yaml

from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import NO_LABEL, EvalImages
from cait.extras.recipe.survey import survey
from cait.run import rundir

HEADER = (
    "| folder | images | classes | pixels | logistic regression | seconds | this recipe, mean (each seed) | "
    "mean over the classes: regression, recipe | CPU seconds | seconds |\n|---|---|---|---|---|---|---|---|---|---|"
)


def train(root: str, name: str, seed: int, more: list[str]) -> tuple[dict[str, float], float, float]:
    """Train one run. Returns its last validation, its CPU seconds and its seconds, start and workers included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "cait", "fit", "--data.root", root, "--run_name", name]
    command += ["--seed_everything", f"{seed}", *more]
    with open(f"{name}.log", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    with open(rundir.LOGS / name / rundir.METRICS, newline="") as lines:
        scored = [row for row in csv.DictReader(lines) if row.get("val/acc1")]
    last = {key: float(scored[-1][key]) for key in ("val/acc1", "val/acc1_macro")}
    return last, used, time.monotonic() - start


def regress(name: str) -> tuple[float, float, float, ImageNetDataModule]:
    """Accuracy and mean over the classes, in per cent, of logistic regression on a run's pixels; and its seconds."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    settings = yaml.safe_load(rundir.config(rundir.LOGS / name).read_text())["data"]
    data = ImageNetDataModule(**settings)
    data.setup()
    grey = survey(data.source.train, data.source.val, data.class_names).grey
    sets = []
    for samples in (data.train_images.samples, data.val_images.samples):
        images = EvalImages(samples, data.eval_transform, data.unreadable, data.preprocessing.reading)
        read = [image for image in map(images.__getitem__, range(len(images))) if image[1] != NO_LABEL]
        pixels = np.stack([image.numpy()[..., : 1 if grey else 3].ravel() for image, _ in read])
        sets.append((pixels.astype(np.float32), np.array([label for _, label in read])))
    (pixels, labels), (val_pixels, val_labels) = sets
    start = time.monotonic()
    scale = StandardScaler().fit(pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its iterations
        model = LogisticRegression(max_iter=1000).fit(scale.transform(pixels), labels)
    right = model.predict(scale.transform(val_pixels)) == val_labels
    recalls = [right[val_labels == label].mean() for label in np.unique(val_labels)]
    return 100 * right.mean(), 100 * float(np.mean(recalls)), time.monotonic() - start, data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    arguments, more = parser.parse_known_args()
    print(HEADER, flush=True)
    for root in arguments.folders:
        names = [f"own-{Path(root).name.replace(' ', '-')}-{seed}-{os.getpid()}" for seed in range(arguments.seeds)]
        runs = [train(root, name, seed, more) for seed, name in enumerate(names)]
        accuracy, macro, took, data = regress(names[0])
        found = [last["val/acc1"] for last, _, _ in runs]
        macros = statistics.mean(last["val/acc1_macro"] for last, _, _ in runs)
        each = ", ".join(f"{value:.1f}" for value in found)
        images = f"{len(data.source.train):,} + {len(data.source.val):,}"
        print(
            f"| {root} | {images} | {data.num_classes} | {data.img_size} | {accuracy:.1f} | {took:.0f} | "
            f"**{statistics.mean(found):.1f}** ({each}) | {macro:.1f}, {macros:.1f} | "
            f"{statistics.mean(used for _, used, _ in runs):.0f} | {statistics.mean(took for *_, took in runs):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
