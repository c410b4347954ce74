"""`cait crossval`: train a run for each fold, and give the mean of their scores and its confidence interval."""

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cait import ckpt, disk
from cait.cli import saved
from cait.cli.options import Line, Options
from cait.data.listing import below
from cait.data.table import held_out_paths
from cait.errors import UserError, console
from cait.extras import curves
from cait.guards.configurations import check_run_name, typed
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, flatten
from contrib.crossval import doubt, doubtful_page
from contrib.runner import OUTPUT, failure, interruptible, refuse_chosen, train_run

DESCRIPTION = """\
Train a run for each of --data.folds folds (5), one after another, under logs/NAME, and give the
mean of their scores with a confidence interval, and the images whose label is doubtful. The other
options are those of `cait fit`; all folds have the settings that the first one chooses. The same
command goes on where it stopped."""
FOLDS = 5
SETTINGS, TABLE, LOCK = "crossval.json", "crossval.csv", ".crossval.lock"
"""Files in the folder: the options that were given, the scores, and what the process that trains holds."""
LEVEL = 0.95


def crossval(arguments: list[str], program: Program) -> None:
    """Train the folds that are missing, and print and write the table of all."""
    parser = Options("crossval", DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="the folder of the runs, in logs/")
    args, settings = parser.parse_known_args(arguments)
    refuse_chosen(settings, "data.fold")
    if "data.folds" not in typed(settings):
        merged: Settings = {}
        for _, layer in Line("fit", settings).layers:
            merged |= flatten(layer)
        settings.append(f"--data.folds={merged.get('data.folds') or FOLDS}")
    options = Options("crossval")
    options.add_argument("--data.folds", dest="folds", nargs="?")
    folds = options.parse_known_args(settings)[0].folds
    if not folds or not folds.isdigit() or int(folds) < 2:
        raise UserError(f"--data.folds must be at least 2, got {folds}")
    check_run_name(args.name)
    folder = rundir.LOGS / args.name
    disk.check_inside(folder)
    _remember(folder, settings)
    runs = [folder / f"fold-{fold}" for fold in range(int(folds))]
    with disk.file_lock(folder / LOCK), interruptible("folds"):
        for fold, run in enumerate(runs):
            _train(program, run, fold, settings)
            _check_apart(runs[: fold + 1])
            print(f"fold {fold} of {folds}: {os.path.relpath(run)}", flush=True)
    _report(folder, runs)
    _doubt(folder, runs, program)


def _remember(folder: Path, settings: list[str]) -> None:
    """Raise UserError if the folder has folds of other settings; otherwise note these."""
    path = folder / SETTINGS
    if path.is_file():
        if disk.read_json(path, [str]) != settings:
            raise UserError(
                f"{folder} has folds with other settings; give another name, or remove it"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and holds no cross-validation; give another name")
    folder.mkdir(parents=True, exist_ok=True)
    disk.write_json(path, settings)


def _train(program: Program, run: Path, fold: int, settings: Sequence[str]) -> None:
    """Train a fold to its end, or on to it. Raises UserError if that fails."""
    if (run / rundir.FINISHED).exists():
        return
    run.mkdir(exist_ok=True)
    if fold:
        first = run.with_name("fold-0")
        settings = [f"--config={rundir.config(first)}", *_decided(first)]
    status = train_run(program, run, [*settings, f"--data.fold={fold}"])
    if not status:
        return
    reason = failure(run, status)
    # it never trained, and one line says why
    if status == 2 and not (run / rundir.CONFIG).exists():
        disk.remove(run)
        if {path.name for path in run.parent.iterdir()} == {SETTINGS, LOCK}:
            disk.remove(run.parent)
        raise UserError(reason)
    raise UserError(f"fold {fold} failed: {reason}; see {run / OUTPUT}")


def _check_apart(runs: Sequence[Path]) -> None:
    """Raise UserError if an image validates in two folds: the images were others when one of them began."""
    held_out = [path for run in runs for path in held_out_paths(run / rundir.VALIDATION)]
    if len({*held_out}) < len(held_out):
        raise UserError(
            f"the images or labels have changed since {runs[0]} was trained; give another name"
        )


def _decided(run: Path) -> list[str]:
    """What a fold has decided by its own pace, as options: the number of its epochs, and who won its race."""
    config = saved.run_settings(run)
    options = ["--race=false"] if config.get("race") else []
    if config.get("plan_minutes"):
        options.append("--plan_minutes=null")
        if epochs := _callbacks(run)["Plan"]["epochs"]:
            options.append(f"--trainer.max_epochs={epochs}")
    return options


def _callbacks(run: Path) -> dict[str, Any]:
    """The states of the callbacks at the end of a run, by their names."""
    return ckpt.read_checkpoint(run / rundir.CHECKPOINTS / rundir.LAST)["callbacks"]


def _report(folder: Path, runs: Sequence[Path]) -> None:
    """Print and write the last and the best score of each fold, the mean of the last ones and its interval."""
    metric = saved.run_settings(runs[0])["best_metric"]
    last = [_last(run, metric) for run in runs]
    best = [_best(run) for run in runs]
    # a share, or in percent
    shown = "{:.4f}".format if max(map(abs, best)) <= 1 else "{:.2f}".format
    table = Table("fold", f"{metric}, last", "best")
    rows = [*zip(range(len(runs)), last, best, strict=True)]
    for fold, *figures in rows:
        table.add_row(str(fold), *map(shown, figures))
    console().print(table)
    print(
        f"{metric} after the last epoch: mean {shown(statistics.mean(last))}, "
        f"standard deviation {shown(statistics.stdev(last))}"
    )
    low, high = map(shown, interval(last))
    print(
        f"{LEVEL:.0%} interval of the mean, corrected for shared training images: {low} to {high}"
    )
    disk.write_csv(folder / TABLE, ["fold", "last", "best"], rows)
    print(os.path.relpath(folder / TABLE))


def _doubt(folder: Path, runs: Sequence[Path], program: Program) -> None:
    """Write the table of the labels, in which the doubtful ones come first, and the page that shows these.

    Confident learning is of one class per image: where images may have several, nothing is written.
    """
    if saved.run_settings(runs[0])["data"].get("multi_label"):
        return
    scored = []
    for run in runs:
        data, fold = doubt.held_out(run, program)
        scored.append(fold)
    source = data.source
    images = source.images
    groups = {}
    if images.groups is not None:
        groups = {
            below(data.root, images.name(index)): images.group(index)
            for index in range(len(images))
        }
    test = [
        (below(data.root, path), source.class_names[label]) for path, label in source.test or ()
    ]
    rows = doubt.write(folder, source.class_names, scored, groups, test)
    print(
        f"{len(rows):,} doubtful labels, with suggestions: {os.path.relpath(folder / doubt.DOUBTFUL)}"
    )
    doubtful_page.write(folder, rows, sum(len(paths) for paths, *_ in scored), data)
    print(os.path.relpath(folder / doubtful_page.PAGE))


def _last(run: Path, metric: str) -> float:
    logged = curves.read(run)
    if metric not in logged:
        raise UserError(f"{run / rundir.METRICS} has no {metric}")
    return logged[metric][1][-1]


def _best(run: Path) -> float:
    """The score of best.ckpt: only the run itself knows whether the largest of a metric of one's own is best."""
    return next(
        float(state["best_model_score"])
        for state in _callbacks(run).values()
        if "other_score" in state
    )


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the mean of a k-fold cross-validation's scores.

    The folds share training images, so their scores vary less than those of independent runs. Nadeau and Bengio
    ("Inference for the Generalization Error", Machine Learning 52, 2003) correct the variance of the mean for it:
    (1 / k + n_val / n_train) · s², which for k folds is (1 / k + 1 / (k - 1)) · s², with k - 1 degrees of freedom.
    """
    from scipy import stats

    k = len(scores)
    mean = statistics.mean(scores)
    error = math.sqrt((1 / k + 1 / (k - 1)) * statistics.variance(scores))
    half = float(stats.t.ppf((1 + LEVEL) / 2, k - 1)) * error
    return mean - half, mean + half
