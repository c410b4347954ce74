"""`cait find-lr` and `cait find-batch`: Lightning's tuner on a recipe. Nothing is written into a run."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cait.cli.options import Options, replaced
from cait.errors import UserError, to_type
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from cait.cli.lightning import CaiTCLI

FURTHER = "Further options are those of `cait fit`, as --config configs/digits.yaml."
SKIP_FIRST = 10
"""Rates that Lightning leaves out of its suggestion."""


def find_lr(arguments: list[str], program: Program) -> None:
    """Raise the learning rate step by step, draw the loss over it, and suggest a peak rate."""
    options = Options("find-lr", f"Train some steps at a rising learning rate and draw the loss. {FURTHER}")
    options.add_argument("--steps", type=int, default=100, help="steps to train; default 100")
    options.add_argument("--min_lr", type=float, default=1e-6, help="rate of the first step; default 1e-6")
    options.add_argument("--max_lr", type=float, default=1.0, help="rate of the last step; default 1")
    figure = rundir.LOGS / "find-lr.png"
    options.add_argument("--output", type=Path, default=figure, metavar="FILE", help="figure to draw")
    given, settings = options.parse_known_args(arguments)
    if given.steps <= 2 * SKIP_FIRST or not 0 < given.min_lr < given.max_lr:
        raise UserError(f"find-lr needs more than {2 * SKIP_FIRST} --steps, and --min_lr above 0 and below --max_lr")

    from cait.extras import plots

    plots.check(given.output)

    def tune(cli: CaiTCLI, tuner: Any) -> None:
        rates = dict(min_lr=given.min_lr, max_lr=given.max_lr, num_training=given.steps)
        found = tuner.lr_find(cli.model, datamodule=cli.datamodule, update_attr=False, **rates)
        found.results["loss"] = _corrected(found.results["loss"])
        rate = found.suggestion(skip_begin=SKIP_FIRST)
        _draw(found.results, rate, given.output)
        print(os.path.relpath(given.output))
        if rate is None:
            raise UserError("too few steps had a finite loss for a suggestion; lower --max_lr")
        # The module multiplies --model.lr by this.
        factor = cli.model.peak_lr() / cli.model.schedule.lr
        scaled = "" if factor == 1 else f", which is --model.lr {rate / factor:.2g} for this batch"
        print(f"the loss falls fastest at a rate of {rate:.2g}{scaled}; look at the figure, then train with")
        option = f"--model.lr {rate / factor:.2g}"
        print("  " + to_type(f'ARGS="{option}"', option))

    _tune(settings, tune, program)


def find_batch(arguments: list[str], program: Program) -> None:
    """Double the batch until memory runs out, the bound is reached or the data set ends."""
    options = Options("find-batch", f"Find the largest batch that fits into memory. {FURTHER}")
    options.add_argument("--max", type=int, metavar="N", help="largest batch to try; default 8192, on the CPU 256")
    given, settings = options.parse_known_args(arguments)
    if given.max is not None and given.max < 2:
        raise UserError(f"--max must be at least 2, got {given.max}")

    def tune(cli: CaiTCLI, tuner: Any) -> None:
        on_cpu = cli.trainer.strategy.root_device.type == "cpu"
        cli.datamodule.prepare_data()
        most = min(given.max or (256 if on_cpu else 8192), len(cli.datamodule.source.train) // 2)
        bound = 1 << (max(2, most).bit_length() - 1)  # a power of 2
        # Lightning returns `max_val` without trying it.
        found = tuner.scale_batch_size(cli.model, datamodule=cli.datamodule, init_val=2, max_val=2 * bound)
        size = min(found, bound)
        reason = f"the largest that was tried; the bound is {bound}" if size == bound else f"{2 * size} did not fit"
        print(f"a batch of {size} images fits on one device ({reason}); train with")
        option = f"--data.batch_size {size}"
        print("  " + to_type(f'ARGS="{option}"', option))

    _tune(settings, tune, program)


def _tune(settings: list[str], tune: Callable[[CaiTCLI, Any], None], program: Program) -> None:
    """Make a run in a folder that is removed again, and hand its Trainer to the tuner."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    from lightning.pytorch.tuner import Tuner

    from cait.cli.lightning import CaiTCLI

    class Tuning(CaiTCLI):
        def fit(self, *_: Any, **__: Any) -> None:
            for package in ("lightning.pytorch", "lightning.fabric"):
                logging.getLogger(package).setLevel(logging.WARNING)
            tune(self, Tuner(self.trainer))

    with tempfile.TemporaryDirectory(prefix="cait-find-") as folder:
        unwanted = ["logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"]
        # The tuner restores a checkpoint of another batch, which a run would refuse.
        place = [f"--trainer.default_root_dir={folder}", "--run_name=find", "--data.check_resume=false"]
        off = [f"--trainer.{name}=false" for name in unwanted]
        Tuning(["fit", *replaced("fit", settings, program), *off, *place], program)


def _corrected(losses: list[float], beta: float = 0.98) -> list[float]:
    """Lightning's moving average of the loss, with each step's own divisor.

    Lightning takes the next step's divisor, so the first loss is half of its true value and any curve rises.
    """
    return [loss * (1 - beta ** (step + 1)) / (1 - beta**step) for step, loss in enumerate(losses, start=1)]


def _draw(results: dict[str, list[float]], rate: float | None, path: Path) -> None:
    from cait.extras import plots

    figure, axes = plots.grid(1, 1, 6, 4)
    (plot,) = axes[0]
    plot.plot(results["lr"], results["loss"])
    plot.set(xscale="log", xlabel="learning rate of the optimizer", ylabel="training loss, smoothed")
    if rate is not None:
        plot.axvline(rate, color="C1", linestyle="--", label=f"falls fastest: {rate:.2g}")
        plot.legend()
    plots.write(figure, path)
