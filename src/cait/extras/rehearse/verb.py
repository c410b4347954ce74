"""`cait rehearse`: runs of `fit` in processes of their own, timed, stopped, killed and continued."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import mkdtemp

import cait
from cait import cores, disk
from cait.cli.options import Options
from cait.errors import UserError, tell_once
from cait.extras.rehearse import keeper, memory, report
from cait.run import rundir
from cait.run.program import Processes, Program

DESCRIPTION = """\
Try a long run on this machine for some minutes: whether it fits into memory, how long it will take, what is slow, and
whether it can be stopped or killed and goes on with the same bits. Give the settings of `cait fit`, and start it as
you will start the run: alone, with torchrun or with srun. It trains in a folder of its own, which is removed."""
SECONDS_A_MINUTE = 6
"""Seconds of training that are timed for each minute of a rehearsal; starts and stops take the others."""
PHASES = {
    "measure": {"14": ["save"], "16": ["save", "measure"]},
    "stop": {"2": ["stop"]},
    "kill": {"14": ["save"], "15": ["kill"]},
    "end": {"16": ["save", "stop"]},
}
"""What happens at which steps: a run is left alone, and one is stopped, resumed and killed, and resumed again.

Several processes stop up to 11 steps after the signal.
"""
VALIDATED = 4
"""Batches of validation that are timed."""
LIMIT, GRACE = 900.0, 30.0
"""Seconds that a phase may take, as it may have to compile, and for which a process may outlive another one."""
SAME = "yes: it goes on with the same bits"
OTHER = "yes, but it goes on with other bits; on a GPU add --trainer.deterministic true"
DONE = (0, 143)
"""Exit statuses of a run that has ended or was stopped."""


def rehearse(arguments: list[str], program: Program) -> None:
    options = Options("rehearse", DESCRIPTION)
    options.add_argument(
        "--minutes", type=float, default=3.0, help="it takes about so long; default 3"
    )
    options.add_argument(
        "--trainer.default_root_dir",
        dest="root",
        type=Path,
        default=rundir.LOGS,
        help="on the disk of the runs; default logs",
    )
    asked, settings = options.parse_known_args(arguments)
    asked.root.mkdir(parents=True, exist_ok=True)
    for number in cores.STOPPING:
        signal.signal(number, signal.default_int_handler)
    # started as this process was, the others look for modules where this one did
    script = program.script or sys.argv[0]
    command = [sys.executable, *(["-m", "cait"] if script.endswith("__main__.py") else [script])]
    processes = program.processes
    folder = Path(processes.from_first(lambda: mkdtemp(prefix=".rehearsal-", dir=asked.root)))
    (folder / rundir.CONFIG).touch()  # trackers log nothing of runs in another's folder
    is_first = processes.rank() == 0
    with kept_clean(str(folder) if is_first else "") as watch:
        seconds = SECONDS_A_MINUTE * asked.minutes
        figures = Rehearsal(processes, folder, watch, command, settings, seconds).run()
        if is_first:
            report.show(figures)
            output = asked.root / time.strftime("rehearsal-%Y%m%d-%H%M%S.json")
            disk.write_json(output, dict(cait=cait.__version__, command=arguments) | figures)
            print(f"{output}: please send it, as CONTRIBUTING.md asks")
        processes.agree()  # the folder is in use until all are here


@contextlib.contextmanager
def kept_clean(folder: str) -> Iterator[int]:
    """A pipe to the program that ends processes and removes a folder once this process has ended, also by kill -9."""
    command = [sys.executable, "-IS", keeper.__file__, folder]
    # in a session of its own, because Ctrl-C is not for it
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin
    try:
        yield process.stdin.fileno()
    finally:
        process.stdin.close()
        process.wait()


@dataclass
class Rehearsal:
    """The phases: each starts `fit` or `resume` once for each process of the launcher."""

    processes: Processes
    folder: Path
    """Of the runs and their reports, the same for all processes."""
    watch: int
    """A pipe that is told which process group is at work."""
    command: list[str]
    """`cait`."""
    settings: list[str]
    """Of `fit`."""
    seconds: float
    """Of training that are timed."""
    memory_left: float = math.inf
    ended_at: float = 0.0

    def run(self) -> report.Figures:
        """The figures, in the first process. Exits in all if the run does not train."""
        failure = self._phase("measure", self._fit("whole"))
        figures = self._report("measure")
        if self.processes.from_first(lambda: "" if figures else "failed"):
            what = "does not fit" if "memory" in failure else "does not train"
            raise UserError(f"the run {what}: {failure}")
        gigabytes = [getrusage(RUSAGE_CHILDREN).ru_maxrss / 976_563, self.memory_left / 1e9]
        figures["memory"] = gigabytes if self.memory_left < math.inf else None
        self._phase("stop", self._fit("cut"))
        seconds = self.ended_at - self._report("stop").get("reported", math.nan)
        resume = ["resume", str(self.folder / "cut"), "--trust-config"]
        for phase, after in (("kill", "stop"), ("end", "kill")):
            failure = self._phase(phase, resume)
            bits = self._report(phase).get("bits")
            figures[after] = SAME if bits and bits.items() <= figures["bits"].items() else OTHER
            if not bits:
                figures[after] = f"no: {failure}"
        figures["stop"] += f"; it ended {seconds:.1f} s after the signal"
        return figures

    def _fit(self, name: str) -> list[str]:
        return [
            "fit",
            *self.settings,
            f"--run_name={name}",
            f"--trainer.default_root_dir={self.folder}",
            f"--trainer.num_sanity_val_steps={VALIDATED}",
            "--ckpt_path=null",
            "--trainer.fast_dev_run=false",
            "--trainer.enable_checkpointing=true",
            "--trainer.logger=true",  # none of the user's own
            "--trainer.callbacks+=cait.extras.rehearse.measure.Rehearse",
        ]

    def _report(self, phase: str) -> report.Figures:
        """What the first process of a phase has written; nothing if it has failed."""
        path = self.folder / f"{phase}.json"
        return disk.read_json(path, dict) if path.exists() else {}

    def _phase(self, phase: str, words: list[str]) -> str:
        """Run `cait` with these words in all processes. Returns how one has failed, empty if none has."""
        tell_once(f"rehearsal: {phase}")
        task = dict(
            phase=phase,
            actions=PHASES[phase],
            folder=str(self.folder),
            seconds=self.seconds,
        )
        output = self.folder / f"{phase}-{self.processes.rank()}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self.command, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | dict(CAIT_REHEARSAL=json.dumps(task)) | self._meeting(),
                start_new_session=True,
                # in the new process, so that there is no moment in which nobody would end it
                preexec_fn=lambda: os.write(self.watch, b"%d\n" % os.getpid()),
            )
        self._wait(process, phase)
        output.with_suffix(".ended").touch()
        status = process.returncode
        failure = "" if status in DONE else f"{status} {last_line(status, output)}"
        # 2 comes after 1, of those that have only lost another
        return max(self.processes.agree(failure)).partition(" ")[2]

    def _meeting(self) -> dict[str, str]:
        """Variables by which the processes of a phase meet: these ones use the launcher's port."""
        cluster = self.processes.cluster()
        if cluster is None:
            return {}
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        # torchrun's store may be on another machine than the first process
        is_far = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        here = f"{socket.getfqdn() if is_far else cluster.main_address} {port}"
        host, port = self.processes.from_first(lambda: here).split()
        return dict(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")

    def _wait(self, process: subprocess.Popen[bytes], phase: str) -> None:
        """Wait for the end of a process, not for ever, and watch the memory."""
        end = time.monotonic() + LIMIT
        while process.poll() is None:
            time.sleep(0.2)
            self.memory_left = min(self.memory_left, memory.left())
            if any(self.folder.glob(f"{phase}-*.ended")):
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                process.kill()
        self.ended_at = time.time()
        with contextlib.suppress(ProcessLookupError):  # what a killed process leaves
            os.killpg(process.pid, signal.SIGKILL)


def last_line(status: int, output: Path) -> str:
    """Why a process has ended: its error, or the last line that it printed."""
    if status == -signal.SIGKILL:
        return "killed by signal 9: memory ran out, or it hung"
    lines = disk.read_text(output).split("\n")
    errors = [line for line in lines if line.startswith("cait: error: ")] or lines[-2:]
    return errors[0].removeprefix("cait: error: ").partition("; to continue: ")[0]
