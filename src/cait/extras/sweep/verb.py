"""`cait sweep`: train the trials of a space, each a run in a process of its own, and resume after any interruption."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from cait.cli.options import Options, stopping
from cait.errors import UserError
from cait.extras.sweep import VARIABLE, trials
from cait.extras.sweep.space import Space, optuna
from cait.extras.sweep.trials import CAUSE, SECONDS, STOPPED
from cait.file_lock import file_lock
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from optuna import Study

OUTPUT = "output.txt"
"""File in the folder of each trial: what it printed."""
CLAIMS = ".claims"
"""Folder of locks in the folder of a sweep; they say who trains which trial."""
POLL = 1.0
"""Seconds between checks of the sweep's other processes."""
KILLS = 3
"""Times in a row that a trial may be killed without a new checkpoint, before it counts as failed."""
DESCRIPTION = """\
Train the trials of a space of settings and show which are best. What is done is not trained
again, and what was interrupted is resumed: give the same command again. Give it in a second
terminal too, or on a second GPU, and both share the work."""


def sweep(arguments: list[str], program: Program) -> None:
    """Train the missing trials of a sweep and write its table and figures."""
    options = Options("sweep", DESCRIPTION)
    options.add_argument("space", metavar="SPACE.yaml", type=Path, nargs="?", help="as configs/sweep/digits.yaml")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at a time, each on its own GPU")
    options.add_argument("--show", action="store_true", help="only show the table of what is done so far")
    given = options.parse_args(arguments)
    if given.space is None:
        raise UserError("which space? `make sweep SPACE=configs/sweep/digits.yaml` or `cait sweep FILE`")
    if given.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {given.jobs}")
    space = Space.read(given.space)
    optuna()
    folder = rundir.LOGS / space.name
    if (folder / rundir.CONFIG).exists():
        raise UserError(f"{folder} is a run; give {given.space} another `name:`")
    if not given.show:
        _check(space, folder, program)
        folder.mkdir(parents=True, exist_ok=True)
        Sweep(space, folder, given.jobs, program).train()
    rows = _report(trials.open_study(folder), space, folder, given.show)
    if rows and all(row.state == "failed" for row in rows):
        raise UserError(f"all {len(rows)} trials have failed; the first: {rows[0].cause}")


def _check(space: Space, folder: Path, program: Program) -> None:
    """Have `fit` parse each value once, before a sweep begins.

    Raises:
        UserError: `fit` refuses one.
    """
    if trials.begun(folder):
        return
    from cait.cli.lightning import CaiTCLI, drive

    for name, value, arguments in space.tries():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                drive(CaiTCLI, ["fit", *arguments, "--print_config"], program)
        except UserError as error:
            raise UserError(f"{space.path}: with {name}: {value}: {error}") from error


class Sweep:
    """The trials of a sweep that this process trains.

    Optuna would restart a trial whose process is gone, under another number. Here the lock of a trial tells whether
    its process lives. If it does not, the next process resumes the trial, which ends bit for bit the same.

    Args:
        space: the sweep's space.
        folder: the sweep's folder.
        jobs: trials at a time.
        program: trains them, each in a process of its own.
    """

    def __init__(self, space: Space, folder: Path, jobs: int, program: Program) -> None:
        self.space, self.folder, self.jobs, self.program = space, folder, jobs, program
        self._stop = threading.Event()
        self._processes: set[subprocess.Popen[bytes]] = set()
        (folder / CLAIMS).mkdir(exist_ok=True)
        with self._locked():
            trials.open_study(folder, space)

    def train(self) -> None:
        """Train until all trials have ended, here or in other processes."""
        with stopping("trials"), ThreadPoolExecutor(self.jobs) as pool:
            workers = [pool.submit(self._work, place) for place in range(self.jobs)]
            try:
                for worker in as_completed(workers):
                    worker.result()
            except BaseException:
                self._stop.set()
                for process in self._processes.copy():
                    process.terminate()
                raise

    def _work(self, place: int) -> None:
        """Train one trial after the other, as the worker number `place`."""
        _keep_to_share(place, self.jobs)
        study, told = trials.open_study(self.folder, self.space), False
        try:
            while not self._stop.is_set():
                claimed = self._claim(study)
                if claimed is not None:
                    number, lock = claimed
                    with lock:
                        self._trial(study, number, place)
                elif running := _running(study):
                    if not told:
                        _say(f"waiting for {', '.join(running)}, which other processes train")
                    told = True
                    self._stop.wait(POLL)
                else:
                    return
        except BaseException:
            self._stop.set()
            raise

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """The lock under which one process at a time begins or ends a trial."""
        return file_lock(self.folder / CLAIMS / "sweep.lock")

    def _claim(self, study: Study) -> tuple[int, FileLock] | None:
        """(the next trial, its lock): one whose process is gone, or else a new one; None if there is neither."""
        with self._locked():
            known = study.get_trials(deepcopy=False)
            for trial in known:
                if trial.state.name == "RUNNING":
                    with contextlib.suppress(Timeout):
                        return trial.number, self._lock(trial.number)
            if len(known) >= self.space.trials:
                return None
            number = study.ask().number
            trials.values_of(study, self.space, number)
            return number, self._lock(number)

    def _lock(self, number: int) -> FileLock:
        lock = FileLock(self.folder / CLAIMS / f"{number:03}.lock")
        lock.acquire(timeout=0)
        return lock

    def _trial(self, study: Study, number: int, place: int) -> None:
        """Train a trial to its end and note what it reached."""
        folder = trials.trial_folder(self.folder, number)
        values = trials.values_of(study, self.space, number)
        _say(f"{folder.name}  {'  '.join(f'{name}={trials.short(value)}' for name, value in values.items())}")
        folder.mkdir(exist_ok=True)
        started = time.monotonic()
        with self._only_process(number) as claim:
            status = claim and self._until_ended(study, number, folder, self._environment(number, place), claim)
        if status is not None:
            self._end(study, number, folder, status, time.monotonic() - started)

    @contextlib.contextmanager
    def _only_process(self, number: int) -> Iterator[int | None]:
        """A lock for the process of a trial, which inherits it; None if the sweep is stopped meanwhile.

        A sweep that is killed leaves its trial training. The next one waits for it here.
        """
        file = os.open(self.folder / CLAIMS / f"{number:03}.process", os.O_RDWR | os.O_CREAT)
        told = False
        try:
            while not self._stop.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    if not told:
                        _say(f"waiting for the process of trial-{number:03}, which a killed sweep has left")
                    told = True
                    self._stop.wait(POLL)
                else:
                    yield file
                    return
            yield None
        finally:
            os.close(file)

    def _until_ended(
        self, study: Study, number: int, folder: Path, environment: dict[str, str], claim: int
    ) -> int | None:
        """The exit status of a trial, which is resumed if it is killed; None if the sweep is stopped."""
        kills, before, status = 0, None, 0
        while kills < KILLS:
            if STOPPED in study.get_trials(deepcopy=False)[number].user_attrs:
                return 0
            status = self._process(self._command(study, number, folder), folder / OUTPUT, environment, claim)
            if status and self._stop.is_set():
                return None
            if 0 <= status < 128:
                return status
            now = max((path.stat().st_mtime_ns for path in (folder / rundir.CHECKPOINTS).glob("*.ckpt")), default=0)
            kills, before = (kills + 1 if now == before else 1), now
            _say(f"{folder.name}  was killed (exit status {status})")
        return status

    def _environment(self, number: int, place: int) -> dict[str, str]:
        own = {VARIABLE: str(number)} if self.space.pruner != "none" else {}
        if self.jobs > 1 and (devices := _devices()):  # a GPU for each
            own["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
        return os.environ | own

    def _command(self, study: Study, number: int, folder: Path) -> list[str]:
        if any((folder / rundir.CHECKPOINTS).glob("*.ckpt")):
            return [*self.program.words(), "resume", str(folder)]
        settings = self.space.arguments(trials.values_of(study, self.space, number))
        place = [f"--trainer.default_root_dir={self.folder}", f"--run_name={folder.name}"]
        return [*self.program.words(), "fit", *settings, *place]

    def _process(self, command: list[str], output: Path, environment: dict[str, str], claim: int) -> int:
        with output.open("ab") as file:
            # In a group of its own: Ctrl-C is for the sweep, which then ends its trials.
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True, pass_fds=[claim]
            )
            self._processes.add(process)
            if self._stop.is_set():  # stopped while the process started
                process.terminate()
            status = process.wait()
            self._processes.discard(process)
        return status

    def _end(self, study: Study, number: int, folder: Path, status: int, seconds: float) -> None:
        """Note the end of a trial.

        Raises:
            UserError: `fit` has refused the trial, and no trial has begun to train yet.
        """
        best = trials.best_of(folder, self.space)
        cause = trials.cause_of(folder / OUTPUT, status) if status else None
        if status == 2 and not trials.begun(self.folder):
            raise UserError(f"{self.space.path}: {folder.name}: {cause}")
        if cause and any(os.strerror(number) in cause for number in (errno.ENOSPC, errno.EDQUOT)):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        if best is None and cause is None:
            cause = f"it has no finite {self.space.metric}"
        with self._locked():
            trial = trials.trial_of(study, number)
            trial.set_user_attr(SECONDS, seconds)
            if cause is not None:
                trial.set_user_attr(CAUSE, cause)
                study.tell(number, state=trials.state("FAIL"))
            elif STOPPED in trial.user_attrs:
                study.tell(number, state=trials.state("PRUNED"))
            else:
                study.tell(number, best)
        known = study.get_trials(deepcopy=False)
        ended = sum(trial.state.is_finished() for trial in known)
        reached = f"failed: {cause}" if cause else f"{self.space.metric} {best:.5g}"
        early = "  stopped early" if STOPPED in known[number].user_attrs and not cause else ""
        _say(f"{folder.name}  {reached}{early}  {seconds:.0f} s  {ended} of {self.space.trials} done")


def _devices() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return given.split(",") if given else [str(device) for device in range(torch.cuda.device_count())]


def _keep_to_share(place: int, jobs: int) -> None:
    """Give this thread, and the processes that it starts, its share of the cores."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[place::jobs]
        if mine:
            os.sched_setaffinity(0, mine)


def _running(study: Study) -> list[str]:
    return [f"trial-{each.number:03}" for each in study.get_trials(deepcopy=False) if each.state.name == "RUNNING"]


def _say(line: str) -> None:
    print(line, flush=True)


def _report(study: Study, space: Space, folder: Path, only_show: bool) -> list[trials.Row]:
    """Print the table. Unless `only_show`, also write it and the figures, and say what to type next.

    Returns the rows of the table.
    """
    rows = trials.rows(study, space, folder)
    _print(rows, space)
    if only_show or not rows:
        return rows
    trials.write_csv(rows, space, folder / "trials.csv")
    print(os.path.relpath(folder / "trials.csv"))
    import matplotlib as mpl

    from cait import plots

    for name, drawn in trials.figures(study, space).items():
        if isinstance(drawn, str):
            print(f"no {name}: {drawn}")
        else:
            with mpl.rc_context({"savefig.bbox": "tight"}):  # Optuna's labels do not fit
                plots.write(drawn, folder / f"{name}.png")
            print(os.path.relpath(folder / f"{name}.png"))
    best = rows[0]
    if best.state == "complete":
        config = best.folder / rundir.CONFIG
        print(
            f"\nThe best is {best.folder}. Train it longer, from the start:\n"
            f"  make train CONFIG={config} RUN={space.name}-best \\\n"
            f'    ARGS="--trainer.default_root_dir {rundir.LOGS} --trainer.max_epochs N"\n'
            f"Score it:\n  make eval RUN={best.folder}"
        )
    return rows


def _print(rows: list[trials.Row], space: Space) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain: Any = {"markup": False, "highlight": False}
    console = Console(**plain) if sys.stdout.isatty() else Console(width=80, **plain)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for label in ("trial", space.metric, "epochs", "s", *trials.labels(space)):
        table.add_column(label, overflow="fold", justify="left" if label == "trial" else "right")
    for row in rows:
        reached = "-" if row.value is None else f"{row.value:.5g}"
        mark = {"complete": "", "pruned": "*"}.get(row.state, f" {row.state}")
        values = [trials.short(value) for value in row.values.values()]
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        table.add_row(f"{row.number}{mark}", reached, row.epochs, seconds, *values)
    console.print(table)
    if any(row.state == "pruned" for row in rows):
        console.print("* stopped early: others were better by then")
    for row in rows:
        if row.cause:
            console.print(f"trial {row.number} failed: {row.cause}")
