"""Runs on folders of images beside scikit-learn's logistic regression on the same pixels.

    python -m cait.extras.recipe.benchmark RUN [RUN ...]

A run is scored by its last epoch: no choice has seen the validation images. The regression gets the validation
transform's pixels of the same images at the same size, standardised by their training mean and deviation; of grey
folders one channel. It prints a row of a table a run; in brackets the mean over the classes.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np

from cait.cli import saved
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import NO_LABEL, EvalImages
from cait.extras import curves
from cait.extras.recipe.survey import survey
from cait.run import rundir


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
    print("| run | images | classes | pixels | logistic regression | the run |\n|---|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:]:
        folder = rundir.folder_of(name)
        last = {metric: values[-1] for metric, (_, values) in curves.read(folder).items()}
        data = ImageNetDataModule(**saved.data_settings(folder))
        data.setup()
        images = f"{len(data.source.train):,} + {len(data.source.val):,}"
        regression, run = regress(data), (last["val/acc1"], last.get("val/acc1_macro", float("nan")))
        scores = " | ".join(f"{accuracy:.1f} ({macro:.1f})" for accuracy, macro in (regression, run))
        print(f"| {name} | {images} | {data.num_classes} | {data.img_size} | {scores} |", flush=True)


if __name__ == "__main__":
    main()
