"""`cait eval`, `validate`, `test` and `predict`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from cait import signature
from cait.cli.options import asks_for_help, replaced, split_run, split_trust
from cait.guards.refusals import config_files
from cait.run import rundir
from cait.run.program import Program

USAGE = """\
usage: cait eval RUN [options of validate]

Score a run on the validation set: its best checkpoint or --ckpt_path FILE, with the raw
weights and with their moving average. RUN is a name in logs/ or the path of a folder.
Every image counts, whatever part of them training looked at. evaluation.json in the run's
folder, or --output FILE, also has the accuracy of each class, the confusion matrix and how
far to trust the probabilities.

  --wanted_accuracy 0.95   find the probability from which on the answers are that accurate
  --tta hflip      score the mean over an image and its mirror image
  --v2 DIR         score on ImageNet-V2 too, or on more images of the same classes
  --extra.NAME DIR score on a further set too: ImageNet-A, -R, -Sketch or -C, or your own
  --real FILE      score on ReaL's labels (real.json); ImageNet needs no file
  --trust-config   run your own parts, package.module:name, that the run's config.yaml names.
                   Code in a stranger's run may do anything."""

WHOLE = ["--trainer.limit_val_batches=null", "--trainer.overfit_batches=0"]
"""Score every image, whatever part training looked at."""


def evaluate(arguments: list[str], program: Program) -> None:
    """Score a run."""
    if asks_for_help(arguments):
        print(USAGE)
        return
    trusted, given = split_trust(arguments)
    folder, overrides = split_run("eval", given)
    place = ["--ckpt_path", str(rundir.best_checkpoint(folder, "score")), "--output", str(folder / rundir.EVALUATION)]
    settings = ["--config", str(rundir.config(folder)), *WHOLE, *_held_out(folder, overrides)]
    _score("validate", [*settings, *place, *overrides], overrides, trusted, program)


def _held_out(folder: Path, overrides: list[str]) -> list[str]:
    """The images that training held out, even if the data folder has grown since."""
    held = folder / rundir.VALIDATION
    others = any(override.split("=")[0] in ("--data.root", "--data.val_list") for override in overrides)
    return ["--data.val_list", str(held)] if held.is_file() and not others else []


def validate(arguments: list[str], program: Program) -> None:
    """Score a checkpoint or weights."""
    trusted, given = split_trust(arguments)
    _score("validate", replaced("validate", given, program), given, trusted, program)


def test(arguments: list[str], program: Program) -> None:
    """Log loss and accuracy of a checkpoint or weights as test/..."""
    trusted, given = split_trust(arguments)
    _score("test", replaced("test", given, program), given, trusted, program)


def predict(arguments: list[str], program: Program) -> None:
    """Write classes and probabilities of a folder of images."""
    trusted, given = split_trust(arguments)
    _score("predict", given, given, trusted, program)


def _score(verb: str, arguments: list[str], given: list[str], trusted: bool, program: Program) -> None:
    """Run one of Lightning's verbs; only what is `given` on the command line may name classes."""
    from cait.cli.lightning import CaiTCLI, drive
    from cait.cli.scores import ScoringCLI
    from cait.guards import trust

    own = [signature.own_text(path) for path in config_files(arguments)]
    remedy = "give it on the command line"
    with (
        trust.only_importing(trust.named(given), "the configuration", remedy),
        contextlib.nullcontext() if trusted else trust.only_objects([*given, *own]),
    ):
        drive(ScoringCLI if verb == "validate" else CaiTCLI, [verb, *arguments], program)
