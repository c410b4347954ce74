"""Runs on the machines of a cluster: how they are started, how far they are, and how they ended."""

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cluster import LOGIN, REPO, call, wait_until
from harness import rows
from runs import RECIPE, assert_same

SETTINGS = [*RECIPE, "--data.num_workers=0", "--trainer.callbacks+=pace.Pace"]
"""A run of 66 steps, on any number of processes, with all that a checkpoint could forget."""
LIMIT = 600.0
"""Seconds after which a job hangs."""


class Trial:
    """A cluster, and a folder on its shared disk in which runs train as in a clone."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.folder = cluster.shared / "project"
        cait = self.folder / ".venv/bin/cait"
        cait.parent.mkdir(parents=True)
        cait.write_text(f'#!/bin/sh\nexec {sys.executable} -m cait "$@"\n')
        cait.chmod(0o755)
        (self.folder / "logs").mkdir()

    def environment(self, **variables):
        own = [REPO / "src", REPO / "tests/support", Path(__file__).parent]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, own)),
            "XDG_CONFIG_HOME": str(self.folder / ".config"),  # of a home that all machines have
            "OMP_NUM_THREADS": "1",
            "PACE": "0.1",
        }
        return environment | {name: str(value) for name, value in variables.items()}

    def on(self, machine, *words):
        """Run a command on a machine in the project; return what it prints."""
        return self.cluster.run(machine, *words, folder=self.folder)

    def start(self, machine, *words, folder=None, **variables):
        """Start a command on a machine in the project, or in a folder of the machine's own."""
        return subprocess.Popen(
            self.cluster.command(machine, *words, folder=folder or self.folder),
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, run, *settings, options="", nodes=2, tasks=1, **variables):
        """Submit scripts/slurm.sbatch. `options` are sbatch's, and `variables` are for the job."""
        shape = f"--nodes={nodes} --ntasks-per-node={tasks} --cpus-per-task=1 --gpus-per-node=1"
        words = ["sbatch", "--parsable", *shape.split(), *options.split()]
        words += [REPO / "scripts/slurm.sbatch", run, *SETTINGS, *settings]
        submitted = self.start(LOGIN, *words, **variables)
        printed, _ = submitted.communicate()
        assert submitted.returncode == 0, printed
        return Job(self, printed.split()[-1], run)

    def steps(self, run):
        """How many steps a run has logged."""
        try:
            return len(rows(self.folder / "logs" / run))
        except OSError:
            return 0

    def wait_for_steps(self, run, steps):
        wait_until(lambda: self.steps(run) >= steps, f"{run} has {steps} steps", LIMIT)

    def workers(self, machine):
        """The numbers of the processes that train on a machine, as it counts them."""
        return self._processes(machine, "-m cait")

    def agents(self, machine):
        """Those of torchrun."""
        return self._processes(machine, "-m torch.distributed.run")

    def _processes(self, machine, words):
        pattern = rf"^{re.escape(sys.executable)}( -\w)* {words}"
        command = self.cluster.command(machine, "pgrep", "--full", pattern)
        return subprocess.run(command, capture_output=True, text=True).stdout.split()

    def pull_cable(self, machine, seconds):
        self.cluster.unplug(machine)
        time.sleep(seconds)
        self.cluster.plug(machine)

    def freeze_disk(self):
        """Let all that is written to the shared disk wait for three seconds."""
        call("fsfreeze", "--freeze", self.cluster.shared)
        time.sleep(3)
        call("fsfreeze", "--unfreeze", self.cluster.shared)

    def assert_same(self, run, other):
        """Two runs ended with the same weights, states and metrics, to the last bit."""
        assert_same(self.folder / "logs" / run, self.folder / "logs" / other)


@dataclass(frozen=True)
class Job:
    """A job of SLURM, which trains a run."""

    trial: Trial
    number: str
    run: str

    def __getitem__(self, name):
        """What SLURM says of it, as "JobState" or "Restarts"."""
        text = self.trial.on(LOGIN, "scontrol", "--oneliner", "show", "job", self.number)
        found = re.search(rf"\b{name}=(\S*)", text)
        assert found, text
        return found[1]

    @property
    def output(self):
        path = Path(self["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait_for(self, *states):
        def is_there():
            return self["JobState"] in states

        wait_until(is_there, f"job {self.number} is {' or '.join(states)}", LIMIT)

    def wait_for_restart(self, number):
        def has_restarted():
            return int(self["Restarts"]) >= number and self["JobState"] == "RUNNING"

        wait_until(has_restarted, f"job {self.number} has restarted {number} times", LIMIT)

    def complete(self):
        """Wait until it has ended without an error."""
        self.wait_for("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        assert self["JobState"] == "COMPLETED", self.output

    def ends_as(self, other):
        """It completes, and its run is the same as another."""
        self.complete()
        self.trial.assert_same(self.run, other)

    def hurries_and_ends_as(self, other):
        """It waits no longer in its steps."""
        hurry = self.trial.folder / "hurry"
        hurry.touch()
        self.ends_as(other)
        hurry.unlink()


def errors_in(text):
    """The lines in which `cait` says why it ends."""
    return [line for line in text.splitlines() if line.startswith("cait: error:")]


def images_by_step(folder):
    """The images of each step, of all processes, as `recorder.Recorder` has written them."""
    steps = defaultdict(set)
    for path in folder.glob("[0-9]*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]].update(record["seen"])
    return steps
