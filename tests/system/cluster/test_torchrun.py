"""torchrun on machines that share a disk, as docs/scale.md has it: what happens to a run, and who learns of it."""

import os
import shutil
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from trial import LIMIT, SETTINGS, images_by_step

PORTS = count(29500)
MACHINES = ("n1", "n2")
RESTARTS = "--max-restarts 5"
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun may start the processes again only with a store that is new each time."""


def torchrun(port, *words, options=""):
    """The command that each machine is given: torchrun with these `options` of its own, and the words of `cait`."""
    meeting = f"--nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint n1:{port}"
    own = [*meeting.split(), *(options or "--nnodes 2").split()]
    return [sys.executable, "-m", "torch.distributed.run", *own, "-m", "cait", *words]


def fit(run, *settings):
    return ["fit", *SETTINGS, *settings, f"--run_name={run}"]


def start(trial, command, **variables):
    """The command on two machines."""
    return {machine: trial.start(machine, *command, **variables) for machine in MACHINES}


def outputs(jobs):
    """What each machine's command has printed, once it has ended."""
    return {machine: job.communicate(timeout=LIMIT)[0] for machine, job in jobs.items()}


def complete(jobs):
    """Wait until all have ended without an error."""
    texts = outputs(jobs)
    assert [job.returncode for job in jobs.values()] == [0] * len(jobs), texts


def errors(text):
    """The lines in which `cait` says why it ends."""
    return [line for line in text.splitlines() if line.startswith("cait: error:")]


# What happens to a run


def test_has_the_bits_of_the_same_run_under_slurm(trial, alone):
    complete(start(trial, torchrun(next(PORTS), *fit("torchrun"))))
    trial.assert_same("torchrun", alone)


def test_a_signal_to_one_process_saves_and_resume_goes_on(trial, alone):
    jobs = start(trial, torchrun(next(PORTS), *fit("signalled")))
    trial.wait_for_steps("signalled", 20)
    trial.on("n2", "kill", "-USR1", *trial.workers("n2"))
    assert "stopped, saved at step" in outputs(jobs)["n1"]
    complete(start(trial, torchrun(next(PORTS), "resume", "signalled")))
    trial.assert_same("signalled", alone)


def test_a_process_is_killed_and_torchrun_starts_all_again(trial, alone):
    command = torchrun(next(PORTS), *fit("torn"), options=f"--nnodes 2 {RESTARTS}")
    jobs = start(trial, command, **NEW_STORE)
    trial.wait_for_steps("torn", 20)
    trial.kill("n2")
    complete(jobs)
    trial.assert_same("torn", alone)


def test_torchrun_itself_is_killed_and_started_again(trial, alone):
    command = torchrun(next(PORTS), *fit("no-agent"), options=f"--nnodes 2 {RESTARTS}")
    jobs = start(trial, command, **NEW_STORE)
    trial.wait_for_steps("no-agent", 20)
    trial.on("n2", "kill", "-KILL", *trial.agents("n2"))
    jobs["n2"].wait(LIMIT)
    jobs["n2"] = trial.start("n2", *command, **NEW_STORE)
    complete(jobs)
    trial.assert_same("no-agent", alone)


def test_a_machine_loses_power_and_comes_back(trial, alone):
    command = torchrun(next(PORTS), *fit("no-power"), options=f"--nnodes 2 {RESTARTS}")
    jobs = start(trial, command, **NEW_STORE)
    trial.wait_for_steps("no-power", 20)
    trial.cluster.off("n2")
    jobs["n2"].wait(LIMIT)
    trial.cluster.on("n2")
    trial.cluster.wait_until_idle()
    jobs["n2"] = trial.start("n2", *command, **NEW_STORE)
    complete(jobs)
    trial.assert_same("no-power", alone)


def test_a_cable_is_out_for_five_seconds(trial, alone):
    jobs = start(trial, torchrun(next(PORTS), *fit("no-cable")))
    trial.wait_for_steps("no-cable", 20)
    trial.pull_cable("n2", 5)
    complete(jobs)
    trial.assert_same("no-cable", alone)


def test_from_two_machines_to_one_and_back_with_the_same_images_a_step(trial):
    plain = ["--data.mixup=0", "--data.cutmix=0", "--trainer.callbacks+=recorder.Recorder"]
    still = torchrun(next(PORTS), *fit("still", *plain, "--trainer.callbacks.folder=seen-still"))
    complete(start(trial, still, PACE=0))
    words = fit("elastic", *plain, "--trainer.callbacks.folder=seen-elastic")
    command = torchrun(next(PORTS), *words, options=f"--nnodes 1:2 {RESTARTS}")
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


@pytest.fixture
def other(trial, alone):
    """A folder of n2's own, in which it has the images but no runs."""
    trial.on("n2", "rm", "-rf", "/tmp/project")
    trial.on("n2", "mkdir", "/tmp/project")
    trial.on("n2", "cp", "-r", "data", "/tmp/project")
    return Path("/tmp/project")


def assert_all_end(trial, command, line, **of_n2):
    """The command ends on both machines within two minutes, with one line that begins so."""
    begun = time.monotonic()
    jobs = {"n1": trial.start("n1", *command), "n2": trial.start("n2", *command, **of_n2)}
    texts = outputs(jobs)
    assert time.monotonic() - begun < 120
    for text in texts.values():
        [error] = errors(text)
        assert error.startswith(f"cait: error: {line}"), texts
    assert all(job.returncode for job in jobs.values())


def test_a_wrong_path(trial):
    command = torchrun(next(PORTS), *fit("wrong", "--data.root=nowhere"))
    assert_all_end(trial, command, "the data folder nowhere does not exist")


def test_no_images_on_one_machine(trial, other):
    shutil.copytree(trial.folder / "data/digits", trial.folder / "images")
    command = torchrun(next(PORTS), *fit("no-images", "--data.root=images"))
    assert_all_end(trial, command, "process 1 on n2: the data folder images does", folder=other)
    assert not (trial.folder / "logs/no-images").exists()


def test_no_run_on_one_machine(trial, other):
    command = torchrun(next(PORTS), "resume", "alone")
    assert_all_end(trial, command, "process 1 on n2: there is no run", folder=other)


def test_no_configuration_on_one_machine(trial, other):
    (trial.folder / "mine.yaml").write_text("model: {lr: 1.0e-3}\n")
    command = torchrun(next(PORTS), *fit("no-file", "--config=mine.yaml"))
    assert_all_end(trial, command, "process 1 on n2: --config mine.yaml: there is no", folder=other)


def test_logs_that_are_not_shared(trial, other):
    command = torchrun(next(PORTS), *fit("apart"))
    line = "n2 does not see logs/apart as n1 has it: all machines of a run must share logs"
    assert_all_end(trial, command, line, folder=other)
    assert not (trial.folder / "logs/apart").exists()


def test_code_of_ones_own_that_differs_on_one_machine(trial, alone):
    changed = trial.folder / "changed"
    changed.mkdir()
    shutil.copy(Path(__file__).with_name("pace.py"), changed)
    with (changed / "pace.py").open("a") as file:
        file.write("# of yesterday\n")
    command = torchrun(next(PORTS), *fit("changed"))
    path = os.pathsep.join([str(changed), trial.environment()["PYTHONPATH"]])
    assert_all_end(trial, command, "process 1 on n2 has your file pace.py", PYTHONPATH=path)
