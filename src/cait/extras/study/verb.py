"""`cait study`: train the grid of `configs/study.yaml` run by run, and draw what comes of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cait import disk
from cait.cli.options import Options, stopping
from cait.data import cores
from cait.errors import UserError, one_line
from cait.extras.study import plan
from cait.extras.study.plan import Grid, Result, Trial
from cait.run import rundir
from cait.run.program import Program

RESULT, OUTPUT = "result.json", "output.txt"
"""Files in the folder of each run: its settings and what it reached, and what it printed."""
DESCRIPTION = """\
Train CaiT and the rivals of LayerScale at several depths, and show whether depth pays. The
grid is configs/study.yaml. Runs that are done are not trained again; one that was
interrupted is resumed. Further options go to every run, as --trainer.max_epochs 5."""


def show(arguments: list[str], program: Program) -> None:
    """Train the missing runs of the grid and write its tables and figures."""
    given, settings = _parse(arguments)
    grid = Grid(given.grid, given.size, given.data)
    runs = Runs(grid, given.out, settings, given.jobs or _jobs(given.data), given.keep_checkpoints)
    originals = grid.originals()
    wanted = {trial.name: trial for trial in originals.values()}
    results = runs.finished()
    if results:
        print(f"{len(results)} of {len(wanted)} runs are done already")
    results |= _train(runs, [trial for name, trial in wanted.items() if name not in results])
    ordered = [plan.as_of(trial, results[originals[trial.name].name]) for trial in grid.trials]
    for path in _write(ordered, runs, given.data):
        print(os.path.relpath(path))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    options = Options("study", DESCRIPTION)
    options.add_argument("--size", default="quick", help="size of the grid: quick, full or your own; default quick")
    options.add_argument("--data", metavar="DIR", help="folder to train on instead of the embedded digits")
    options.add_argument("--out", type=Path, default=rundir.LOGS / "study", metavar="DIR", help="default logs/study")
    options.add_argument("--grid", type=Path, default=plan.GRID, metavar="FILE", help="default configs/study.yaml")
    options.add_argument("--jobs", type=int, help="runs at a time; default one for each core, with --data 1")
    options.add_argument("--keep_checkpoints", action="store_true", help="keep the runs' checkpoints")
    given, settings = options.parse_known_args(arguments)
    if given.jobs is not None and given.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {given.jobs}")
    if settings and not settings[0].startswith("--"):
        raise UserError(f"`cait study` takes options only, not {settings[0]!r}; the folder of images is --data DIR")
    return given, settings


def _jobs(data: str | None) -> int:
    return 1 if data else cores.share(1)


class Runs:
    """The runs of a study, in a folder each.

    Args:
        grid: what to train.
        folder: where the runs lie.
        settings: further arguments of each run.
        jobs: runs at a time, which share the cores.
        keep_checkpoints: whether a finished run keeps them.
    """

    def __init__(self, grid: Grid, folder: Path, settings: list[str], jobs: int, keep_checkpoints: bool) -> None:
        self.grid, self.folder, self.settings = grid, folder, settings
        self.jobs, self.keep_checkpoints = jobs, keep_checkpoints
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def finished(self) -> dict[str, Result]:
        """The existing results, by the name of the run.

        Raises:
            UserError: a run, finished or not, has other settings.
        """
        found = {}
        for trial in self.grid.trials:
            path = self.folder / trial.name / RESULT
            settings, result = _read_result(path)
            if settings is not None and settings != self._settings(trial):
                raise UserError(
                    f"{path.parent} was trained with other settings; remove {self.folder} or give another --out"
                )
            if result is not None:
                found[trial.name] = result
        return found

    def train(self, trial: Trial) -> Result | None:
        """Train or resume one run in a process of its own; None if the study was stopped.

        Raises:
            UserError: the run failed for another reason than its gradients.
        """
        folder, start = self.folder / trial.name, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints = folder / rundir.CHECKPOINTS
        self._write_result(trial, None)
        if any(checkpoints.glob("*.ckpt")):
            command = ["resume", str(folder)]
        else:
            place = [f"--trainer.default_root_dir={self.folder}", f"--run_name={trial.name}"]
            command = ["fit", f"--config={self.grid.config}", *self._settings(trial), *place]
        code = self._run([sys.executable, "-m", "cait", *command], folder / OUTPUT)
        if self._stopped:
            return None
        result = plan.result_of(trial, folder, time.monotonic() - start)
        if code and not result.failed:
            lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = lines[-1].removeprefix("cait: error: ") if lines else f"exit status {code}"
            raise UserError(f"the run {trial.name} failed: {reason}; see {folder / OUTPUT}")
        self._write_result(trial, result)
        if not self.keep_checkpoints:
            shutil.rmtree(checkpoints, ignore_errors=True)
        return result

    def stop(self) -> None:
        """Have the current runs save and end."""
        self._stopped = True
        for process in self._processes.copy():
            process.terminate()

    def _write_result(self, trial: Trial, result: Result | None) -> None:
        """Note the settings of a run, and once it has ended its result."""
        content = {"settings": self._settings(trial), "result": result and dataclasses.asdict(result)}
        with disk.whole(self.folder / trial.name / RESULT) as beside:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _settings(self, trial: Trial) -> list[str]:
        return [*self.grid.arguments(trial), *self.settings]

    def _run(self, command: list[str], output: Path) -> int:
        environment = dict(os.environ)
        if self.jobs > 1:  # threads that share cores wait for each other
            environment["OMP_NUM_THREADS"] = str(cores.share(self.jobs))
        if self._stopped:
            return 1
        with output.open("ab") as file:
            # In a group of its own: Ctrl-C is for the study, which then ends its runs.
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
            self._processes.add(process)
            if self._stopped:  # stopped while the process started
                process.terminate()
            code = process.wait()
            self._processes.discard(process)
        return code


def _read_result(path: Path) -> tuple[list[str] | None, Result | None]:
    """(the settings of a run, its result); None for what is not there yet.

    Raises:
        UserError: the file is not what the study has written.
    """
    if not path.is_file():
        return None, None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["settings"], content["result"] and Result(**content["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of a study; remove it: {one_line(error)}") from error


def _train(runs: Runs, trials: list[Trial]) -> dict[str, Result]:
    """Train `trials`, several at a time; return the results by name."""
    results: dict[str, Result] = {}
    if not trials:
        return results
    with _progress() as progress, stopping("runs"), ThreadPoolExecutor(runs.jobs) as pool:
        task = progress.add_task("runs", total=sum(map(_cost, trials)))
        waiting = {pool.submit(runs.train, trial): trial for trial in trials}
        try:
            for future in as_completed(waiting):
                trial, result = waiting[future], future.result()
                if result is not None:
                    results[trial.name] = result
                    progress.advance(task, _cost(trial))
                    failed = ", failed" if result.failed else ""
                    progress.console.print(
                        f"{len(results):>4} of {len(trials)}  {trial.name}: {result.acc1:.2f} %{failed}"
                        f"  {result.seconds:.0f} s"
                    )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runs.stop()
            raise
    return results


def _cost(trial: Trial) -> int:
    """What a run costs, relative to others: its blocks, and its start."""
    return trial.depth + 6


def _progress() -> Progress:
    left = TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), left, speed_estimate_period=600
    )


def _write(results: list[Result], runs: Runs, data: str | None) -> list[Path]:
    """Write tables and figures; return their paths."""
    folder, place = runs.folder, data or "the embedded digits"
    table, report, by_depth, by_layer = (
        folder / name for name in ("results.csv", "study.md", "depth.png", "gradients.png")
    )
    trials = [trial for trial in runs.grid.trials if not trial.is_place]
    deepest = max((trial.depth for trial in trials), default=0)
    deep: plan.RunsByMethod = {}
    for trial in trials:
        if trial.depth == deepest:
            deep.setdefault(trial.method, []).append(folder / trial.name)
    plan.write_csv(results, table)
    plan.write_report(results, deep, report, f"Depth on {place}")
    if not trials:
        return [table, report]
    plan.draw_depth(results, by_depth)
    plan.draw_layers(deep, by_layer, f"{deepest} blocks on {place}")
    return [table, report, by_depth, by_layer]
