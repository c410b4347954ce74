"""scripts/slurm.sbatch on machines of a real SLURM: whatever happens to a run, it ends as if nothing had.

"As if nothing had" is the same weights, states and metrics to the last bit as those of a run that nobody touched.
"""

import time

import pytest
from cluster import CORES, LOGIN, wait_until
from harness import checkpoint, rows
from trial import LIMIT, Job, images_by_step

# What ends a job for a while


def test_three_time_limits_in_a_row(trial, alone):
    # SLURM looks every 30 seconds, so a signal of 60 seconds before the limit comes up to 90 before it.
    job = trial.submit("limits", options="--time=2 --signal=USR1@60", PACE=4)

    def has_stopped_three_times():
        return job.output.count("stopped, saved at step") >= 3

    wait_until(has_stopped_three_times, "the third time limit", LIMIT)
    hurry = trial.folder / "hurry"
    hurry.touch()
    job.complete()
    hurry.unlink()
    trial.assert_same("limits", alone)


def test_requeued_by_hand(trial, alone):
    job = trial.submit("requeued")
    trial.wait_for_steps("requeued", 20)
    job.requeue()
    job.wait_for_restart()
    job.complete()
    trial.assert_same("requeued", alone)


def test_makes_way_for_a_job_of_a_partition_of_higher_priority(trial, alone):
    job = trial.submit("preempted")
    trial.wait_for_steps("preempted", 20)
    everything = ["--nodes=3", f"--ntasks-per-node={CORES}", "--output=/dev/null"]
    trial.on(LOGIN, "sbatch", "--partition=high", *everything, "--wrap=sleep 5")
    job.wait_for_restart()
    job.complete()
    trial.assert_same("preempted", alone)


def test_slurmctld_restarts(trial, alone):
    job = trial.submit("no-controller")
    trial.wait_for_steps("no-controller", 20)
    trial.restart_slurmctld()
    job.complete()
    assert job["Restarts"] == "0"
    trial.assert_same("no-controller", alone)


# What breaks


@pytest.mark.parametrize("machine", ["n1", "n2"])
def test_a_task_is_killed(machine, trial, alone):
    run = f"killed-on-{machine}"
    job = trial.submit(run, options="--nodelist=n1,n2")
    trial.wait_for_steps(run, 20)
    trial.kill(machine)
    job.wait_for_restart()
    job.complete()
    trial.assert_same(run, alone)


def test_one_of_four_tasks_is_killed(trial, alone_of_four):
    job = trial.submit("killed-of-four", options="--nodelist=n1,n2", tasks=2)
    trial.wait_for_steps("killed-of-four", 20)
    trial.on("n2", "kill", "-KILL", trial.workers("n2")[1])
    job.wait_for_restart()
    job.complete()
    trial.assert_same("killed-of-four", alone_of_four)


@pytest.mark.parametrize("machine", ["n1", "n2"])
def test_a_machine_loses_power(machine, trial, alone):
    """The first has the job's script, and process 0. The third takes its place."""
    run = f"no-power-on-{machine}"
    job = trial.submit(run)
    trial.wait_for_steps(run, 20)
    trial.cluster.off(machine)
    job.wait_for_restart()
    trial.cluster.on(machine)
    job.complete()
    trial.assert_same(run, alone)
    trial.cluster.wait_until_idle()


def test_a_machine_of_four_processes_loses_power(trial, alone_of_four):
    job = trial.submit("no-power-of-four", tasks=2)
    trial.wait_for_steps("no-power-of-four", 20)
    trial.cluster.off("n2")
    job.wait_for_restart()
    trial.cluster.on("n2")
    job.complete()
    trial.assert_same("no-power-of-four", alone_of_four)
    trial.cluster.wait_until_idle()


@pytest.mark.parametrize("seconds", [5, 40])
def test_a_cable_is_pulled_out_and_put_in_again(seconds, trial, alone):
    """After 20 seconds SLURM gives the machine up; its processes live on meanwhile."""
    run = f"no-cable-for-{seconds}-seconds"
    job = trial.submit(run)
    trial.wait_for_steps(run, 20)
    trial.pull_cable("n2", seconds)
    job.complete()
    assert (job["Restarts"] == "0") == (seconds == 5)
    trial.assert_same(run, alone)
    trial.cluster.wait_until_idle()


# The shared disk


def test_the_shared_disk_is_slow(trial, alone):
    job = trial.submit("slow-disk")
    trial.wait_for_steps("slow-disk", 10)
    for _ in range(5):
        trial.freeze_disk()
        time.sleep(1)
    job.complete()
    assert job["Restarts"] == "0"
    trial.assert_same("slow-disk", alone)


def test_the_shared_disk_is_full_for_a_minute(trial, alone):
    """It ends the run, which is an error of yours; once there is room the same command goes on."""
    filler = trial.cluster.shared / "filler"
    job = trial.submit("full-disk", PACE=0.5)
    trial.wait_for_steps("full-disk", 20)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            pass
    time.sleep(60)
    filler.unlink()
    job.wait_for("COMPLETED", "FAILED")
    if job["JobState"] == "FAILED":
        assert job["ExitCode"] == "2:0"
        trial.submit("full-disk").complete()
    trial.assert_same("full-disk", alone)


# How jobs are submitted, and end


def test_an_array_of_three_runs_at_once(trial, alone):
    array = trial.submit("seed-%a", "--seed_everything=%a", options="--array=0-2")
    for number in range(3):
        Job(trial, f"{array.number}_{number}").complete()
    trial.assert_same("seed-0", alone)
    curves = [str(rows(trial.folder / f"logs/seed-{number}")) for number in range(3)]
    assert len({*curves}) == 3


def test_scancel_saves_and_the_job_does_not_come_back(trial, alone):
    job = trial.submit("cancelled")
    trial.wait_for_steps("cancelled", 20)
    trial.on(LOGIN, "scancel", job.number)
    job.wait_for("CANCELLED")
    trial.cluster.wait_until_idle()
    saved = checkpoint(trial.folder / "logs/cancelled")["global_step"]
    assert f"stopped, saved at step {saved}" in job.output
    assert saved >= 20
    time.sleep(15)
    assert job["JobState"] == "CANCELLED"
    trial.submit("cancelled").complete()
    trial.assert_same("cancelled", alone)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_wrong_path_fails_once_with_one_line(tasks, trial):
    job = trial.submit(f"wrong-{tasks}", "--data.root=nowhere", tasks=tasks)
    job.wait_for("FAILED")
    [line] = job.errors()
    assert line.startswith("cait: error: the data folder nowhere does not exist")
    assert (job["Restarts"], job["ExitCode"]) == ("0", "2:0")
    assert not (trial.folder / f"logs/wrong-{tasks}").exists()


def test_a_path_that_one_machine_lacks_fails_with_its_name(trial, alone):
    trial.on("n1", "mkdir", "/tmp/images")
    trial.on("n1", "cp", "-r", "data/digits", "/tmp/images/digits")
    job = trial.submit("on-one", "--data.root=/tmp/images/digits", options="--nodelist=n1,n2")
    job.wait_for("FAILED")
    [line] = job.errors()
    assert line.startswith("cait: error: process 1 on n2: the data folder /tmp/images/digits")
    assert (job["Restarts"], job["ExitCode"]) == ("0", "2:0")


def test_five_failures_in_a_row_stop_a_job(trial):
    job = trial.submit("dies", "--trainer.callbacks+=pace.Dies")
    job.wait_for("FAILED")
    assert job["Restarts"] == "5"
    assert "failed too often: not requeued" in job.output
    assert not list(trial.folder.glob("slurm-*.failures"))


# Other machines


def test_from_three_machines_to_two_and_back_with_the_same_images_a_step(trial):
    def submit(run, **shape):
        plain = ["--data.batch_size=96", "--data.mixup=0", "--data.cutmix=0"]
        seen = ["--trainer.callbacks+=recorder.Recorder", f"--trainer.callbacks.folder=seen-{run}"]
        return trial.submit(run, *plain, *seen, **shape)

    submit("stays", nodes=3).complete()
    for nodes, steps in ((3, 10), (2, 20)):
        job = submit("moves", nodes=nodes, PACE=0.5)
        trial.wait_for_steps("moves", steps)
        trial.on(LOGIN, "scancel", job.number)
        trial.cluster.wait_until_idle()
    submit("moves", nodes=3).complete()
    expected = images_by_step(trial.folder / "seen-stays")
    assert len(expected) == 42
    assert images_by_step(trial.folder / "seen-moves") == expected
