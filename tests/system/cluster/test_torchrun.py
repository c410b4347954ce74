"""torchrun on machines that share a disk, as docs/scale.md has it: what happens to a run, and who learns of it."""

import os
import shutil
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from trial import LIMIT, SETTINGS, errors_in, images_by_step

PORTS = count(29500)
TWO = "--nnodes 2"
AGAIN = "--nnodes 2 --max-restarts 5"
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun may start the processes again only with a store that is new each time."""


def torchrun(*words, options=TWO):
    """The command that each machine is given: torchrun with these `options` of its own, and the words of `cait`."""
    meeting = f"--nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint n1:{next(PORTS)}"
    own = [*meeting.split(), *options.split()]
    return [sys.executable, "-m", "torch.distributed.run", *own, "-m", "cait", *words]


def fit(run, *settings):
    return ["fit", *SETTINGS, *settings, f"--run_name={run}"]


def start(trial, command, **variables):
    """The command on two machines."""
    return {name: trial.start(name, *command, **variables) for name in ("n1", "n2")}


def outputs(jobs):
    """What each machine's command has printed, once it has ended."""
    return {machine: job.communicate(timeout=LIMIT)[0] for machine, job in jobs.items()}


def complete(jobs):
    """Wait until all have ended without an error."""
    texts = outputs(jobs)
    assert [job.returncode for job in jobs.values()] == [0] * len(jobs), texts


# What happens to a run


def test_has_the_bits_of_the_same_run_under_slurm(trial, alone):
    complete(start(trial, torchrun(*fit("torchrun"))))
    trial.assert_same("torchrun", alone)


def test_a_signal_to_one_process_saves_and_resume_goes_on(trial, alone):
    jobs = start(trial, torchrun(*fit("signalled")))
    trial.wait_for_steps("signalled", 20)
    trial.on("n2", "kill", "-USR1", *trial.workers("n2"))
    assert "stopped, saved at step" in outputs(jobs)["n1"]
    complete(start(trial, torchrun("resume", "signalled")))
    trial.assert_same("signalled", alone)


def process_killed(trial):
    trial.on("n2", "kill", "-KILL", *trial.workers("n2"))


def torchrun_killed(trial):
    trial.on("n2", "kill", "-KILL", *trial.agents("n2"))


def power_lost(trial):
    trial.cluster.off("n2")
    trial.cluster.on("n2")
    trial.cluster.wait_until_idle()


def cable_cut(trial):
    trial.pull_cable("n2", 5)


@pytest.mark.parametrize(
    ("fault", "options", "is_started_again"),
    [
        (process_killed, AGAIN, False),
        (torchrun_killed, AGAIN, True),
        (power_lost, AGAIN, True),
        (cable_cut, TWO, False),
    ],
)
def test_a_run_that_a_fault_strikes_ends_as_if_nothing_had(
    fault, options, is_started_again, trial, alone
):
    run = fault.__name__
    command = torchrun(*fit(run), options=options)
    jobs = start(trial, command, **NEW_STORE)
    trial.wait_for_steps(run, 20)
    fault(trial)
    if is_started_again:
        jobs["n2"].wait(LIMIT)
        jobs["n2"] = trial.start("n2", *command, **NEW_STORE)
    complete(jobs)
    trial.assert_same(run, alone)


def test_from_two_machines_to_one_and_back_with_the_same_images_a_step(trial):
    plain = ["--data.mixup=0", "--data.cutmix=0", "--trainer.callbacks+=recorder.Recorder"]
    still = torchrun(*fit("still", *plain, "--trainer.callbacks.folder=seen-still"))
    complete(start(trial, still, PACE=0))
    words = fit("elastic", *plain, "--trainer.callbacks.folder=seen-elastic")
    command = torchrun(*words, options="--nnodes 1:2 --max-restarts 5")
    slow = NEW_STORE | {"PACE": 0.7}
    jobs = start(trial, command, **slow)
    trial.wait_for_steps("elastic", 10)
    trial.on("n2", "kill", "-KILL", *trial.agents("n2"), *trial.workers("n2"))
    jobs["n2"].wait(LIMIT)
    trial.wait_for_steps("elastic", 30)
    jobs["n2"] = trial.start("n2", *command, **slow)
    complete(jobs)
    expected = images_by_step(trial.folder / "seen-still")
    assert len(expected) == 66
    assert images_by_step(trial.folder / "seen-elastic") == expected


# What one machine lacks ends the run of all, with a line on each


@pytest.fixture(scope="module")
def other(trial):
    """A folder of n2's own, in which it has the digits, but neither runs nor what is added in the project here."""
    shutil.copytree(trial.folder / "data/digits", trial.folder / "images")
    (trial.folder / "mine.yaml").write_text("model: {lr: 1.0e-3}\n")
    trial.on("n2", "mkdir", "/tmp/project")
    trial.on("n2", "cp", "-r", "data", "/tmp/project")
    return Path("/tmp/project")


def assert_all_end(trial, words, line, **of_n2):
    """`cait` with these words ends on both machines within two minutes, with one line that begins so."""
    begun = time.monotonic()
    command = torchrun(*words)
    jobs = {"n1": trial.start("n1", *command), "n2": trial.start("n2", *command, **of_n2)}
    texts = outputs(jobs)
    assert time.monotonic() - begun < 120
    for text in texts.values():
        [error] = errors_in(text)
        assert error.startswith(f"cait: error: {line}"), texts
    assert all(job.returncode for job in jobs.values())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (fit("none", "--data.root=nowhere"), "the data folder nowhere does not exist"),
        (fit("none", "--data.root=images"), "process 1 on n2: the data folder images does"),
        (["resume", "alone"], "process 1 on n2: there is no run"),
        (fit("none", "--config=mine.yaml"), "process 1 on n2: --config mine.yaml: there is no"),
        (fit("none"), "n2 does not see logs/none as n1 has it: all machines of a run must share"),
    ],
)
def test_what_one_machine_lacks(words, line, trial, alone, other):
    assert_all_end(trial, words, line, folder=other)
    assert not (trial.folder / "logs/none").exists()


def test_code_of_ones_own_that_differs_on_one_machine(trial, alone):
    changed = trial.folder / "changed"
    changed.mkdir()
    shutil.copy(Path(__file__).with_name("pace.py"), changed)
    with (changed / "pace.py").open("a") as file:
        file.write("# of yesterday\n")
    path = os.pathsep.join([str(changed), trial.environment()["PYTHONPATH"]])
    line = "process 1 on n2 has your file pace.py"
    assert_all_end(trial, fit("changed"), line, PYTHONPATH=path)
