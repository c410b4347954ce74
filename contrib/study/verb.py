"""`cait study`: train the runs of a grid, several at a time, and draw what comes of it."""

import argparse
import os
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from rich.progress import Progress

from cait import cores, disk
from cait.cli.options import Options
from cait.errors import UserError, console
from cait.run import rundir
from cait.run.program import Program
from contrib.runner import OUTPUT, failure, interruptible, train_run
from contrib.study import report
from contrib.study.grid import GRID, Grid, StudyRun
from contrib.study.results import Result, result_of

RESULT = "result.json"
"""File in the folder of each run, with its settings."""

DESCRIPTION = """\
Train CaiT and the rivals of LayerScale at several depths, and show whether depth pays. The
grid is a YAML file. Runs that are done are not trained again; one that was interrupted is
resumed. Further options go to every run, as --trainer.max_epochs 5."""


def study(arguments: list[str], program: Program) -> None:
    """Train the missing runs of the grid and write its tables and figures."""
    args, settings = _parse(arguments)
    grid = Grid(args.grid, args.size, args.data, settings)
    disk.check_inside(args.out)
    runs = StudyRuns(grid, args.out, args.jobs or (1 if args.data else cores.share(1)), program)
    originals = grid.originals()
    wanted = {run.name: run for run in originals.values()}
    runs.check(wanted.values())
    missing = [run for run in wanted.values() if not runs.is_done(run)]
    if len(missing) < len(wanted):
        print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are done already")
    _train(runs, missing)
    results = [result_of(run, args.out / originals[run.name].name) for run in grid.runs]
    for path in _write(results, args.out, args.data):
        print(os.path.relpath(path))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    options = Options("study", DESCRIPTION)
    options.add_argument(
        "--size", default="quick", help="size of the grid: quick, full or your own; default quick"
    )
    options.add_argument(
        "--data", metavar="DIR", help="folder to train on instead of the embedded digits"
    )
    options.add_argument(
        "--out", type=Path, default=rundir.LOGS / "study", metavar="DIR", help="default logs/study"
    )
    options.add_argument(
        "--grid", type=Path, default=GRID, metavar="FILE", help="default the grid of the paper"
    )
    options.add_argument(
        "--jobs", type=int, help="runs at a time; default one for each core, with --data 1"
    )
    args, settings = options.parse_known_args(arguments)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    if settings and not settings[0].startswith("--"):
        raise UserError(
            f"`cait study` takes options only, not {settings[0]!r}; the folder of images is --data DIR"
        )
    return args, settings


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study, in a folder each."""

    grid: Grid
    folder: Path
    jobs: int
    """Runs at a time, which share the cores."""
    program: Program
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def check(self, wanted: Iterable[StudyRun]) -> None:
        """Raise UserError if one was trained with other settings, to its end or not."""
        for run in wanted:
            path = self.folder / run.name / RESULT
            if path.is_file() and disk.read_json(path, {"settings": [str]})[
                "settings"
            ] != self.grid.arguments(run):
                raise UserError(
                    f"{path.parent} was trained with other settings; remove {self.folder} or give another --out"
                )

    def is_done(self, run: StudyRun) -> bool:
        """Whether it has come to its end, or to that of its gradients."""
        return any(
            (self.folder / run.name / name).exists() for name in (rundir.FINISHED, rundir.NONFINITE)
        )

    def train(self, run: StudyRun) -> Result | None:
        """Train or resume one run in a process of its own; None if the study was stopped.

        A UserError says that it failed for another reason than its gradients.
        """
        folder = self.folder / run.name
        settings = self.grid.arguments(run)
        folder.mkdir(exist_ok=True)  # in the study's, which may have been moved away
        disk.write_json(folder / RESULT, {"settings": settings})
        # Threads that share cores would wait for each other.
        variables = {"OMP_NUM_THREADS": str(cores.share(self.jobs))} if self.jobs > 1 else {}
        arguments = [f"--config={self.grid.config}", *settings]
        status = train_run(self.program, folder, arguments, variables, self.stopped.is_set)
        if self.is_done(run):
            shutil.rmtree(folder / rundir.CHECKPOINTS, ignore_errors=True)
            return result_of(run, folder)
        if self.stopped.is_set():
            return None
        raise UserError(
            f"the run {run.name} failed: {failure(folder, status or 0)}; see {folder / OUTPUT}"
        )


def _train(runs: StudyRuns, missing: list[StudyRun]) -> None:
    """Train the missing runs, several at a time."""
    if not missing:
        return
    with (
        interruptible("runs"),
        Progress(speed_estimate_period=600, console=console()) as progress,
        ThreadPoolExecutor(runs.jobs) as pool,
    ):
        task = progress.add_task("runs", total=sum(run.depth for run in missing))
        waiting = {pool.submit(runs.train, run): run for run in missing}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                run = waiting[future]
                result = future.result()
                if result:
                    progress.advance(task, run.depth)
                    failed = ", failed" if result.failed else ""
                    progress.console.print(
                        f"{number:>4} of {len(missing)}  {run.name}: {result.acc1:.2f} %{failed}"
                    )
        except BaseException:
            runs.stopped.set()  # those that train save
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write(results: list[Result], folder: Path, data: str | None) -> list[Path]:
    """Write tables and figures; return their paths."""
    table = folder / "results.csv"
    text = folder / "study.md"
    figure = folder / "depth.png"
    disk.write_csv(table, Result.FIELDS, map(attrgetter(*Result.FIELDS), results))
    report.write_report(results, text, f"Depth on {data or 'the embedded digits'}")
    if all(result.is_place for result in results):
        return [table, text]
    report.draw_depth(results, figure)
    return [table, text, figure]
