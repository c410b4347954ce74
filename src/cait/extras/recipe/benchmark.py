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
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import mean

import numpy as np
import yaml

from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import NO_LABEL, EvalImages
from cait.extras.recipe.survey import survey
from cait.run import rundir

HEADER = (
    "| folder | images | classes | pixels | logistic regression (mean over the classes) | this recipe, mean "
    "(each seed) | mean over the classes | CPU seconds |\n|---|---|---|---|---|---|---|---|"
)


def train(root: str, name: str, seed: int, more: list[str]) -> tuple[float, float, float]:
    """Train one run. Returns accuracy and mean over the classes in per cent, and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "cait", "fit", "--data.root", root, "--run_name", name]
    with open(f"{name}.log", "w") as log:
        subprocess.run([*command, f"--seed_everything={seed}", *more], check=True, stdout=log, stderr=log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with open(rundir.LOGS / name / rundir.METRICS, newline="") as lines:
        *_, last = (row for row in csv.DictReader(lines) if row.get("val/acc1"))
    return float(last["val/acc1"]), float(last["val/acc1_macro"]), used


def regress(data: ImageNetDataModule) -> tuple[float, float]:
    """Accuracy and mean over the classes, in per cent, of logistic regression on a run's pixels."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, balanced_accuracy_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    grey = survey(data.source.train, data.source.val, data.class_names).grey
    sets = []
    for samples in (data.train_images.samples, data.val_images.samples):
        images = EvalImages(samples, data.eval_transform, data.unreadable, data.preprocessing.reading)
        read = [image for image in map(images.__getitem__, range(len(images))) if image[1] != NO_LABEL]
        pixels = np.stack([image.numpy()[..., : 1 if grey else 3].ravel() for image, _ in read])
        sets.append((pixels.astype(np.float32), np.array([label for _, label in read])))
    (pixels, labels), (val_pixels, val_labels) = sets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that has not converged after all of its iterations
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(pixels, labels)
    answers = model.predict(val_pixels)
    return 100 * accuracy_score(val_labels, answers), 100 * balanced_accuracy_score(val_labels, answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    arguments, more = parser.parse_known_args()
    print(HEADER, flush=True)
    for root in arguments.folders:
        names = [f"own-{Path(root).name.replace(' ', '-')}-{seed}-{os.getpid()}" for seed in range(arguments.seeds)]
        found, macros, used = zip(*(train(root, name, seed, more) for seed, name in enumerate(names)), strict=True)
        data = ImageNetDataModule(**yaml.safe_load(rundir.config(rundir.LOGS / names[0]).read_text())["data"])
        data.setup()
        accuracy, macro = regress(data)
        each = ", ".join(f"{value:.1f}" for value in found)
        images = f"{len(data.source.train):,} + {len(data.source.val):,}"
        print(
            f"| {root} | {images} | {data.num_classes} | {data.img_size} | "
            f"{accuracy:.1f} ({macro:.1f}) | **{mean(found):.1f}** ({each}) | {mean(macros):.1f} | {mean(used):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
