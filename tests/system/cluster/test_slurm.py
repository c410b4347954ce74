"""scripts/slurm.sbatch on machines of a real SLURM: whatever happens to a run, it ends as if nothing had.

"As if nothing had" is the same weights, states and metrics to the last bit as those of a run that nobody touched.
"""

import time

import faults
from cluster import LOGIN, wait_until
from harness import checkpoint, over_table, rows
from trial import LIMIT, Job, errors_in, images_by_step


@over_table(__file__, "faults", machine="n2", options="", tasks=1, goes_on=False)
def test_a_run_that_a_fault_strikes_ends_as_if_nothing_had_happened(
    case, fault, machine, options, tasks, goes_on, trial, request
):
    """The first machine has the job's script, and process 0."""
    alone = request.getfixturevalue("alone" if tasks == 1 else "alone_of_four")
    run = case.replace(" ", "-")
    job = trial.submit(run, options=options, tasks=tasks)
    trial.wait_for_steps(run, 20)
    faults.strike(getattr(faults, fault), job, machine)
    job.ends_as(alone)
    assert (job["Restarts"] == "0") == goes_on
    trial.cluster.wait_until_idle()


def test_three_time_limits_in_a_row(trial, alone):
    # SLURM looks every 30 seconds, so a signal of 60 seconds before the limit comes up to 90 before it.
    job = trial.submit("limits", options="--time=2 --signal=USR1@60", PACE=4)

    def has_stopped_three_times():
        return job.output.count("stopped, saved at step") >= 3

    wait_until(has_stopped_three_times, "the third time limit", LIMIT)
    job.hurries_and_ends_as(alone)


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
        job = trial.submit("full-disk")
    job.ends_as(alone)


# How jobs are submitted, and end


def test_an_array_of_three_runs_at_once(trial, alone):
    array = trial.submit("seed-%a", "--seed_everything=%a", options="--array=0-2")
    curves = set()
    for number in range(3):
        Job(trial, f"{array.number}_{number}", f"seed-{number}").complete()
        curves.add(str(rows(trial.folder / f"logs/seed-{number}")))
    trial.assert_same("seed-0", alone)
    assert len(curves) == 3


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
    trial.submit("cancelled").ends_as(alone)


@over_table(__file__, "mistakes", on_n1="", options="", tasks=1)
def test_a_mistake_fails_once_with_one_line(case, words, says, on_n1, options, tasks, trial, alone):
    if on_n1:
        trial.on("n1", "cp", "-r", "data/digits", on_n1)
    job = trial.submit(case, *words, options=options, tasks=tasks)
    job.wait_for("FAILED")
    [line] = errors_in(job.output)
    assert line.startswith(f"cait: error: {says}")
    assert (job["Restarts"], job["ExitCode"]) == ("0", "2:0")
    assert not (trial.folder / "logs" / case).exists()


def test_five_failures_in_a_row_stop_a_job(trial):
    job = trial.submit("dies", "--trainer.callbacks+=pace.Dies")
    job.wait_for("FAILED")
    assert job["Restarts"] == "5"
    assert "failed too often: not requeued" in job.output
    assert not list(trial.folder.glob("slurm-*.failures"))


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
