"""Faults at random moments strike one run on two machines; it ends with the bits of a run that nobody touched.

make test-cluster ARGS="-k random --seed 7"
"""

import random
import time
from collections.abc import Callable

from cluster import LOGIN, wait_until
from trial import LIMIT, Job, Trial

MACHINES = ("n1", "n2", "n3")
NUMBER = 20


class Faults:
    """What may happen to a job. Each method returns once it is over."""

    def __init__(self, trial: Trial, job: Job, draw: random.Random):
        self.trial = trial
        self.job = job
        self.draw = draw

    def machine(self) -> str:
        """One on which the job trains."""
        return self.draw.choice([name for name in MACHINES if self.trial.workers(name)])

    def restarted_by(self, fault: Callable[[], object]):
        restarts = int(self.job["Restarts"])
        fault()
        self.job.wait_for_restart(restarts + 1)

    def requeue(self):
        self.restarted_by(self.job.requeue)

    def time_limit(self):
        signal = ("scancel", "--signal=USR1", self.job.number)
        self.restarted_by(lambda: self.trial.on(LOGIN, *signal))

    def kill(self):
        machine = self.machine()
        self.restarted_by(lambda: self.trial.kill(machine))

    def power(self):
        machine = self.machine()
        self.restarted_by(lambda: self.trial.cluster.off(machine))
        self.trial.cluster.on(machine)

    def cable(self):
        self.trial.pull_cable(self.machine(), 5)


def test_random_faults_in_one_run(trial, alone, request):
    draw = random.Random(request.config.getoption("--seed"))
    job = trial.submit("many-faults", PACE=3, FAILURES=NUMBER)
    faults = Faults(trial, job, draw)
    kinds = [
        *(faults.requeue, faults.time_limit, faults.kill, faults.power),
        *(faults.cable, trial.restart_slurmctld, trial.freeze_disk),
    ]
    metrics = trial.folder / "logs/many-faults/metrics.csv"
    for number, fault in enumerate(draw.sample(kinds * 3, NUMBER)):
        begun = time.time()

        def trains(begun=begun):
            return metrics.exists() and metrics.stat().st_mtime > begun

        wait_until(trains, f"it trains before fault {number + 1}", LIMIT)
        time.sleep(draw.uniform(0, 6))
        print(
            f"fault {number + 1}: {fault.__name__}, {trial.steps('many-faults')} steps", flush=True
        )
        fault()
    hurry = trial.folder / "hurry"
    hurry.touch()
    job.complete()
    hurry.unlink()
    trial.assert_same("many-faults", alone)
