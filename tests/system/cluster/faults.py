"""What may strike a run under SLURM, on one of its machines. Each ends once it is over."""

import time

from cluster import CORES, LOGIN


def requeue(job, machine):
    job.trial.on(LOGIN, "scontrol", "requeue", job.number)


def time_limit(job, machine):
    job.trial.on(LOGIN, "scancel", "--signal=USR1", job.number)


def preemption(job, machine):
    """A job of a partition of higher priority wants all machines."""
    everything = ["--nodes=3", f"--ntasks-per-node={CORES}", "--output=/dev/null"]
    job.trial.on(LOGIN, "sbatch", "--partition=high", *everything, "--wrap=sleep 5")


def kill(job, machine):
    """Of several processes of the machine the last."""
    job.trial.on(machine, "kill", "-KILL", job.trial.workers(machine)[-1])


def power_loss(job, machine):
    job.trial.cluster.off(machine)


def short_cut(job, machine):
    """Of a cable."""
    job.trial.pull_cable(machine, 5)


def long_cut(job, machine):
    """After 20 seconds SLURM gives the machine up; its processes live on meanwhile."""
    job.trial.pull_cable(machine, 40)


def restart_slurmctld(job, machine):
    job.trial.on(LOGIN, "sh", "-c", "kill $(cat /run/slurmctld.pid)")
    time.sleep(5)
    job.trial.on(LOGIN, "slurmctld")


def slow_disk(job, machine):
    for _ in range(5):
        job.trial.freeze_disk()
        time.sleep(1)


ENDING = (requeue, time_limit, preemption, kill, power_loss)
"""The job goes back into the queue and starts again."""


def strike(fault, job, machine):
    restarts = int(job["Restarts"])
    fault(job, machine)
    if fault in ENDING:
        job.wait_for_restart(restarts + 1)
    if fault == power_loss:
        job.trial.cluster.on(machine)
