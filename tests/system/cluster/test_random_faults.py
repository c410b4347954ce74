"""Faults at random moments strike one run on two machines; it ends with the bits of a run that nobody touched.

make test-cluster ARGS="-k random --seed 7"
"""

import random
import time

import faults
from cluster import wait_until
from trial import LIMIT

NUMBER = 20
KINDS = [
    faults.requeue,
    faults.time_limit,
    faults.kill,
    faults.power_loss,
    faults.short_cut,
    faults.restart_slurmctld,
    faults.slow_disk,
]


def test_random_faults_in_one_run(trial, alone, request):
    draw = random.Random(request.config.getoption("--seed"))
    job = trial.submit("many-faults", PACE=3, FAILURES=NUMBER)
    metrics = trial.folder / "logs/many-faults/metrics.csv"
    for fault in draw.sample(KINDS * 3, NUMBER):
        begun = time.time()

        def trains(begun=begun):
            return metrics.exists() and metrics.stat().st_mtime > begun

        wait_until(trains, f"it trains before {fault.__name__}", LIMIT)
        time.sleep(draw.uniform(0, 6))
        machine = draw.choice([name for name in trial.cluster.machines if trial.workers(name)])
        print(f"{fault.__name__} on {machine}, {trial.steps('many-faults')} steps", flush=True)
        faults.strike(fault, job, machine)
    job.hurries_and_ends_as(alone)
