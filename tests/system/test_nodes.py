"""Several processes and several nodes, as launchers start them: how they fail, stop, and start again."""

import os
import shutil
import signal
import subprocess

import pytest
from harness import LIMIT, REPO, SMALL, checkpoint, ended, environment, start
from runs import ENDLESS, RECIPE, TWO, assert_same, torchrun, wait_for_steps


def test_a_restart_goes_on_from_the_runs_own_checkpoint_and_not_from_its_start(
    cait, tmp_path, trained, monkeypatch
):
    run = tmp_path / "logs/cut"
    shutil.copytree(trained, run)
    (tmp_path / "start.ckpt").write_bytes(b"no longer used")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    short = ["--trainer.limit_train_batches=6", "--trainer.max_epochs=2", "--ema.decay=0.9"]
    restarted = cait("fit", *SMALL, *short, "--run_name=cut", "--ckpt_path=start.ckpt")
    assert restarted.returncode == 0, restarted.stderr
    assert checkpoint(run)["global_step"] == 12


@pytest.mark.parametrize("left", ["exc/on_exception.ckpt", "logs/hpc_ckpt_1.ckpt"])
def test_a_new_run_starts_anew_whatever_files_lie_there(left, cait, tmp_path, monkeypatch):
    """An error or a job of SLURM has left a checkpoint: Lightning alone would go on with it."""
    (tmp_path / left).parent.mkdir()
    (tmp_path / left).write_bytes(b"of another run")
    words = []
    if "exc" in left:
        words.append("--trainer.callbacks+=lightning.pytorch.callbacks.OnExceptionCheckpoint")
        words.append("--trainer.callbacks.dirpath=exc")
    else:
        for name in ("NTASKS", "JOB_ID"):
            monkeypatch.setenv(f"SLURM_{name}", "1")
        for name in ("PROCID", "LOCALID", "NODEID"):
            monkeypatch.setenv(f"SLURM_{name}", "0")
        monkeypatch.setenv("SLURM_JOB_NAME", "train")
    done = cait("fit", *SMALL, "--trainer.fast_dev_run=true", *words)
    assert done.returncode == 0, done.stderr
    assert "estor" not in done.stdout + done.stderr


@pytest.mark.slow
def test_two_tasks_that_srun_started_in_a_shell_of_salloc(cait, tmp_path):
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "interactive",
        "MASTER_PORT": "29714",
    }
    tasks = []
    for rank in "01":
        variables = environment() | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        tasks.append(start(tmp_path, "fit", *ENDLESS, "--run_name=cut", env=variables))
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 3, tasks[0])
    tasks[1].send_signal(signal.SIGUSR1)
    outputs = [task.communicate(timeout=LIMIT)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [138, 138], outputs
    assert "cait resume cut" in outputs[0]
    assert checkpoint(run)["global_step"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("command", "status"), [((), 2), (torchrun("--standalone"), 1)])
def test_an_error_in_one_process_ends_all_with_a_line(command, status, cait, tmp_path):
    shutil.copy(REPO / "tests/system/misfortunes.py", tmp_path)
    happens = ["--trainer.callbacks+=misfortunes.ErrorInOneProcess", "--trainer.callbacks.step=5"]
    failed = cait("fit", *SMALL, *TWO, *happens, "--run_name=cut", command=command)
    assert failed.returncode == status
    assert "cait/cli" not in failed.stderr  # no traceback of ours; torchrun shows its own
    lines = [line for line in failed.stderr.splitlines() if line.startswith("cait: error: ")]
    first, second = sorted(lines)
    to_continue = "; to continue: cait resume cut"
    assert first.endswith(f"as of an image that only this process meets{to_continue}")
    assert second.endswith(f"another process of the run has ended, and says why{to_continue}")


def children(job):
    listed = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True)
    return [int(number) for number in listed.stdout.split()]


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(cait, tmp_path, place):
    """Saved by the clock, and inside SLURM, which started torchrun as its one task."""
    words = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    variables = environment() | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a new store for each start
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    command = torchrun("--max-restarts=1", "--standalone")
    job = start(tmp_path, "fit", *words, "--run_name=cut", command=command, env=variables)
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    os.kill(children(job)[1], signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))
