"""`cait features`: what a network's head sees of images, in a file; and how well simple classifiers do with it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.cli import loading
from cait.cli.options import Options, run_missing
from cait.errors import UserError, console, printable
from cait.run.program import Program

if TYPE_CHECKING:
    import numpy as np

    from cait.extras.features.files import Features
    from cait.extras.features.images import Listed


def features(arguments: list[str], program: Program) -> None:
    """Write the features of images, and print the scores of classifiers on them."""
    given = _options(arguments)
    from cait.extras.features import files, images

    if given.output:
        files.check(given.output)
    checkpoint, folder = (None, None) if given.name else loading.checkpoint_of(given.run, "take features of")
    listed = images.listed(given.images, given.probe)
    if not given.output and listed.training is None:
        raise UserError("nothing to do: name a file with --output, or score features with --probe")
    from cait.guards import trust

    with trust.only_own(given.trusted):
        if checkpoint is None:
            from cait.extras.features.models import named

            loaded = named(given.name, given.weights, given.img_size)
        else:
            loaded = loading.from_checkpoint(
                checkpoint, folder, given.ema, given.img_size, program.module, program.data
            )
        found = extract(loaded, listed, loading.device(folder))
    print(f"{len(found):,} × {found.features.shape[1]:,} features of {loaded.name}: {loaded.about}")
    if given.output:
        files.write(given.output, found)
        print(given.output)
    if listed.training is not None:
        score(found)


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("features", "Write what the head of a network sees of images: [N, d] in float32.")
    options.epilog = "With folders train and val it also prints how well nearest neighbours and a linear probe do."
    options.add_argument("run", metavar="RUN", nargs="?", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument("--name", metavar="MODEL", help="a network in place of a run, as timm/resnet18 or xxs24")
    options.add_argument("--weights", metavar="FILE", help="its weights; default: those that timm publishes")
    options.add_argument("--images", type=Path, metavar="DIR", help="class folders, train and val, or any folder")
    options.add_argument("--output", type=Path, metavar="FILE", help="file to write, .npz or .parquet")
    options.add_argument("--img_size", type=int, metavar="PIXELS", help="another resolution: positions are resized")
    options.add_argument("--probe", action="store_true", help="score class folders too, on a tenth of each")
    options.add_weights()
    options.add_trust()
    given = options.parse_args(arguments)
    if given.run is None and given.name is None:
        raise run_missing("features")
    if given.run is not None and given.name is not None:
        raise UserError(f"name a run or a network, not both: {given.run} and --name {given.name}")
    if given.weights and given.name is None:
        raise UserError("--weights FILE needs the name of its network, as --name timm/resnet18")
    if given.images is None:
        raise UserError("which images? name a folder with --images")
    return given


def extract(loaded: loading.Loaded, listed: Listed, device: Any) -> Features:
    """The features of images. Those that cannot be read are named on the screen and left out.

    Raises:
        UserError: none can be read, the network has no head, or a feature is not finite.
    """
    import numpy as np

    from cait.extras.features.files import Features
    from cait.extras.probes import classifier, inputs

    data, network, names = loaded.data, loaded.network.to(device), listed.names()
    if (head := classifier(network)) is None:
        raise UserError(f"{loaded.name} has no classifier, whose input would be the features: give it get_classifier()")
    data.num_workers = min(data.workers(1), len(names) // data.eval_batch_size)  # a few images need no workers
    data.predict_samples = listed.files
    rows, readable = list[Any](), list[bool]()
    for images, marks in data.predict_dataloader():
        rows.append(inputs(network, head, images.to(device)))
        readable += (marks >= 0).tolist()
    kept = np.flatnonzero(readable)
    for index in np.flatnonzero(~np.array(readable)):
        print(f"left out, because it cannot be read: {printable(names[index])}", file=sys.stderr)
    if not len(kept):
        raise UserError(f"none of the {len(names):,} images can be read")
    found = np.concatenate(rows)[kept]
    if not np.isfinite(found).all():
        raise UserError(f"{loaded.name} has features that are not finite")
    labels, training = np.array(listed.files.labels, np.int64)[kept], listed.training
    training = None if training is None else int((kept < training).sum())
    return Features(found, [names[index] for index in kept], labels, listed.class_names, training)


def score(found: Features) -> None:
    """Print how well simple classifiers do on the images to validate on that have seen those to train on."""
    from rich.table import Table

    from cait.extras import probes

    begin, table = time.monotonic(), Table("", "how")
    for column in ("top-1", "mean of the classes"):
        table.add_column(column, justify="right")
    train, val = found.features[: found.training], found.features[found.training :]
    labels, val_labels = found.labels[: found.training], found.labels[found.training :]
    if len(set(labels.tolist())) < 2 or not len(val):
        raise UserError("too few images can be read to score classifiers on them")
    for name, answer in ANSWERS.items():
        answers, how = answer(train, val, labels, len(found.class_names))
        scores = probes.accuracies(answers, val_labels)
        table.add_row(name, how, f"{scores['acc1']:.2f} %", f"{scores['acc1_macro']:.2f} %")
    seconds = time.monotonic() - begin
    print(f"{len(train):,} images to learn from, {len(val):,} to score on, {seconds:.1f} s")
    console().print(table)


def _neighbours(train: np.ndarray, val: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, str]:
    from cait.extras import probes

    answers, k = probes.neighbours(train, val, labels, classes)
    return answers, f"{k} by their cosine"


def _linear(train: np.ndarray, val: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, str]:
    from cait.extras import probes

    answers, kept = probes.regression(train, val, labels, classes)
    return answers, f"logistic regression{probes.of_all(kept, len(train))}"


ANSWERS: dict[str, Callable[..., tuple[Any, str]]] = {"nearest neighbours": _neighbours, "linear probe": _linear}
