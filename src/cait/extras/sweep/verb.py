"""`cait sweep`: train trials, each a run in a process of its own, and go on after any interruption."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from cait.cli.options import Options
from cait.errors import UserError
from cait.extras.runner import Runner, failure
from cait.extras.sweep import VARIABLE, table, trials
from cait.extras.sweep.search_space import SearchSpace, optuna
from cait.extras.sweep.trials import CAUSE, SECONDS, STOPPED
from cait.file_lock import file_lock
from cait.run import rundir
from cait.run.program import Program

if TYPE_CHECKING:
    from optuna import Study

LOCKS = ".claims"
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
    options.add_argument("space", metavar="SPACE.yaml", type=Path, nargs="?", help="what to search, a file")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at a time, each on its own GPU")
    options.add_argument("--show", action="store_true", help="only show the table of what is done so far")
    given = options.parse_args(arguments)
    if given.space is None:
        example = os.path.relpath(Path(__file__).with_name("digits.yaml"))
        raise UserError(f"which space? `make sweep SPACE={example}` or `cait sweep FILE`")
    if given.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {given.jobs}")
    search = SearchSpace.read(given.space)
    optuna()
    folder = rundir.LOGS / search.name
    if (folder / rundir.CONFIG).exists():
        raise UserError(f"{folder} is a run; give {given.space} another `name:`")
    if not given.show:
        if not trials.has_begun(folder):
            check_values(search, program)
        folder.mkdir(parents=True, exist_ok=True)
        Sweep(search, folder, given.jobs, Runner(program, "trials")).train()
    rows = _report(trials.open_study(folder), search, folder, given.show)
    if rows and all(row.state == "failed" for row in rows):
        raise UserError(f"all {len(rows)} trials have failed; the first: {rows[0].cause}")


def check_values(search: SearchSpace, program: Program) -> None:
    """Have `fit` parse each value once, before a sweep begins.

    Raises:
        UserError: `fit` refuses one.
    """
    from cait.cli.lightning import CaiTCLI, drive

    for name, value, arguments in search.probes():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                drive(CaiTCLI, ["fit", *arguments, "--print_config"], program)
        except UserError as error:
            raise UserError(f"{search.path}: with {name}: {value}: {error}") from error


class Sweep:
    """The trials of a sweep that this process trains.

    Optuna would restart a trial whose process is gone, under another number. Here the lock of a trial tells whether
    its process lives. If it does not, the next process resumes the trial, which ends bit for bit the same.

    Args:
        search: what the sweep searches.
        folder: the sweep's folder.
        jobs: trials at a time.
        runner: starts the trials.
    """

    def __init__(self, search: SearchSpace, folder: Path, jobs: int, runner: Runner) -> None:
        self.search, self.folder, self.jobs, self.runner = search, folder, jobs, runner
        (folder / LOCKS).mkdir(exist_ok=True)
        with self._locked():
            trials.open_study(folder, search)

    def train(self) -> None:
        """Train until all trials have ended, here or in other processes."""
        with self.runner.threads(self.jobs) as pool:
            for worker in as_completed([pool.submit(self._work, place) for place in range(self.jobs)]):
                worker.result()

    def _work(self, worker: int) -> None:
        """Train one trial after the other, as the worker of this number."""
        _keep_to_share(worker, self.jobs)
        study, is_waiting = trials.open_study(self.folder, self.search), False
        while not self.runner.stopped.is_set():
            if found := self._next_trial(study):
                number, lock = found
                with lock:
                    self._train(study, number, worker)
            elif running := _running(study):
                if not is_waiting:
                    _print(f"waiting for {', '.join(running)}, which other processes train")
                is_waiting = True
                self.runner.stopped.wait(POLL)
            else:
                return

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        """The lock under which one process at a time begins or ends a trial."""
        return file_lock(self.folder / LOCKS / "sweep.lock")

    def _next_trial(self, study: Study) -> tuple[int, FileLock] | None:
        """The number and the lock of the next trial to train; None if no trial is left.

        A trial whose process has ended too early comes first, then a new one.
        """
        with self._locked():
            known = study.get_trials(deepcopy=False)
            for trial in known:
                if trial.state.name == "RUNNING":
                    with contextlib.suppress(Timeout):
                        return trial.number, self._lock(trial.number)
            if len(known) >= self.search.trials:
                return None
            number = study.ask().number
            trials.values_of(study, self.search, number)
            return number, self._lock(number)

    def _lock(self, number: int) -> FileLock:
        lock = FileLock(self.folder / LOCKS / f"{number:03}.lock")
        lock.acquire(timeout=0)
        return lock

    def _train(self, study: Study, number: int, worker: int) -> None:
        """Train a trial to its end and note what it reached."""
        folder = trials.trial_folder(self.folder, number)
        values = trials.values_of(study, self.search, number)
        _print(f"{folder.name}  {'  '.join(f'{name}={table.short(value)}' for name, value in values.items())}")
        folder.mkdir(exist_ok=True)
        start = time.monotonic()
        with self._only_process(number) as file:
            status = None if file is None else self._run(study, number, worker, file)
        if status is not None:
            self._end(study, number, folder, status, time.monotonic() - start)

    @contextlib.contextmanager
    def _only_process(self, number: int) -> Iterator[int | None]:
        """A lock for the process of a trial, which inherits the file; None if the sweep is stopped meanwhile.

        A sweep that is killed leaves its trial training. The next one waits for it here.
        """
        file = os.open(self.folder / LOCKS / f"{number:03}.process", os.O_RDWR | os.O_CREAT)
        is_waiting = False
        try:
            while not self.runner.stopped.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    if not is_waiting:
                        _print(f"waiting for the process of trial-{number:03}, which a killed sweep has left")
                    is_waiting = True
                    self.runner.stopped.wait(POLL)
                else:
                    yield file
                    return
            yield None
        finally:
            os.close(file)

    def _run(self, study: Study, number: int, worker: int, file: int) -> int | None:
        """The exit status of a trial, which is resumed if it is killed; None if the sweep is stopped."""
        folder = trials.trial_folder(self.folder, number)
        settings = self.search.arguments(trials.values_of(study, self.search, number))
        kills, checkpoint, status = 0, None, 0
        while kills < KILLS:
            if STOPPED in study.get_trials(deepcopy=False)[number].user_attrs:
                return 0
            status = self.runner.run(folder, settings, self._variables(number, worker), [file])
            if status and self.runner.stopped.is_set():
                return None
            if 0 <= status < 128:
                return status
            newest = max((path.stat().st_mtime_ns for path in (folder / rundir.CHECKPOINTS).glob("*.ckpt")), default=0)
            kills, checkpoint = (kills + 1 if newest == checkpoint else 1), newest
            _print(f"{folder.name}  was killed (exit status {status})")
        return status

    def _variables(self, number: int, worker: int) -> dict[str, str]:
        variables = {VARIABLE: str(number)} if self.search.pruner != "none" else {}
        if self.jobs > 1 and (devices := _devices()):  # a GPU for each
            variables["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
        return variables

    def _end(self, study: Study, number: int, folder: Path, status: int, seconds: float) -> None:
        """Note the end of a trial.

        Raises:
            UserError: `fit` has refused the trial before any trial began, or the disk is full.
        """
        best = table.best_value(folder, self.search)
        cause = failure(folder, status) if status else None
        if status == 2 and not trials.has_begun(self.folder):
            raise UserError(f"{self.search.path}: {folder.name}: {cause}")
        if cause and any(os.strerror(code) in cause for code in (errno.ENOSPC, errno.EDQUOT)):
            raise UserError(f"{folder.name}: {cause}; make room and give the same command again")
        if best is None and cause is None:
            cause = f"it has no finite {self.search.metric}"
        with self._locked():
            trial = trials.trial_of(study, number)
            trial.set_user_attr(SECONDS, seconds)
            is_pruned = STOPPED in trial.user_attrs
            if cause is not None:
                trial.set_user_attr(CAUSE, cause)
                study.tell(number, state=trials.state("FAIL"))
            elif is_pruned:
                study.tell(number, state=trials.state("PRUNED"))
            else:
                study.tell(number, best)
        ended = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
        result = f"failed: {cause}" if cause else f"{self.search.metric} {best:.5g}"
        early = "  stopped early" if is_pruned and not cause else ""
        _print(f"{folder.name}  {result}{early}  {seconds:.0f} s  {ended} of {self.search.trials} done")


def _devices() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]


def _keep_to_share(worker: int, jobs: int) -> None:
    """Give this thread, and the processes that it starts, its share of the cores."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[worker::jobs]
        if cores:
            os.sched_setaffinity(0, cores)


def _running(study: Study) -> list[str]:
    return [f"trial-{trial.number:03}" for trial in study.get_trials(deepcopy=False) if trial.state.name == "RUNNING"]


def _print(line: str) -> None:
    print(line, flush=True)


def _report(study: Study, search: SearchSpace, folder: Path, only_show: bool) -> list[table.Row]:
    """Print the table. Unless `only_show`, also write it and the figures, and say what to type next.

    Returns the rows of the table.
    """
    rows = table.read_rows(study, search, folder)
    table.show(rows, search)
    if only_show or not rows:
        return rows
    table.write_csv(rows, search, folder / "trials.csv")
    print(os.path.relpath(folder / "trials.csv"))
    import matplotlib as mpl

    from cait.extras import plots

    for name, figure in table.figures(study, search).items():
        if isinstance(figure, str):
            print(f"no {name}: {figure}")
        else:
            with mpl.rc_context({"savefig.bbox": "tight"}):  # Optuna's labels do not fit
                plots.write(figure, folder / f"{name}.png")
            print(os.path.relpath(folder / f"{name}.png"))
    best = rows[0]
    if best.state == "complete":
        print(
            f"\nThe best is {best.folder}. Train it longer, from the start:\n"
            f"  make train CONFIG={best.folder / rundir.CONFIG} RUN={search.name}-best \\\n"
            f'    ARGS="--trainer.default_root_dir {rundir.LOGS} --trainer.max_epochs N"\n'
            f"Score it:\n  make eval RUN={best.folder}"
        )
    return rows
