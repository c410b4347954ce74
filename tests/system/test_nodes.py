"""Several processes and several nodes, as launchers start them: how they fail, stop, and start again."""

import os
import shutil
import signal
import subprocess

import pytest
from harness import (
    LIMIT,
    SMALL,
    TWO_BLOCKS,
    call,
    checkpoint,
    ended,
    environment,
    free_port,
    start,
    works,
)
from runs import ENDLESS, RECIPE, SLURM, TWO, assert_same, torchrun, wait_for_steps


@pytest.mark.usefixtures("cait")
def test_a_restart_goes_on_from_the_runs_own_checkpoint_and_not_from_its_start(tmp_path, trained):
    run = tmp_path / "logs/cut"
    shutil.copytree(trained, run)
    (tmp_path / "start.ckpt").write_bytes(b"no longer used")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    words = """
        --trainer.limit_train_batches=6 --trainer.max_epochs=2 --ema.decay=0.9 --data.num_workers=0
        --run_name=cut --ckpt_path=start.ckpt
    """
    works(call(tmp_path, "fit", *SMALL, TWO_BLOCKS, *words.split()))
    assert checkpoint(run)["global_step"] == 12


@pytest.mark.usefixtures("cait")
@pytest.mark.parametrize(
    ("left", "callback", "variables"),
    [
        ("exc/left.ckpt", "OnExceptionCheckpoint --trainer.callbacks.dirpath=exc", {}),
        ("logs/hpc_ckpt_1.ckpt", "ModelSummary", SLURM),
    ],
)
def test_a_new_run_starts_anew_whatever_files_lie_there(left, callback, variables, tmp_path):
    """An error or a job of SLURM has left a checkpoint: Lightning alone would go on with it."""
    (tmp_path / left).parent.mkdir()
    (tmp_path / left).write_bytes(b"of another run")
    os.environ.update(variables)
    words = f"--trainer.fast_dev_run=true --data.num_workers=0 --trainer.callbacks+ {callback}"
    done = works(call(tmp_path, "fit", *SMALL, *words.split()))
    assert "estor" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("cait")
def test_two_tasks_that_srun_started_in_a_shell_of_salloc(tmp_path):
    job = SLURM | {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_JOB_NAME": "interactive",
        "MASTER_PORT": free_port(),
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
    happens = ["--trainer.callbacks+=misfortunes.ErrorInOneProcess", "--trainer.callbacks.step=5"]
    failed = cait("fit", *SMALL, *TWO, *happens, "--run_name=cut", command=command)
    assert failed.returncode == status
    assert "cait/cli" not in failed.stderr  # no traceback of ours; torchrun shows its own
    lines = [line for line in failed.stderr.splitlines() if line.startswith("cait: error: ")]
    first, second = sorted(lines)
    to_continue = "; to continue: cait resume cut"
    assert first.endswith(f"as of an image that only this process meets{to_continue}")
    assert second.endswith(f"another process of the run has ended, and says why{to_continue}")


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(cait, tmp_path, place):
    """Saved by the clock, and inside SLURM, which started torchrun as its one task."""
    words = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # for each start
    variables = environment() | SLURM | new_store
    command = torchrun("--max-restarts=1", "--standalone")
    job = start(tmp_path, "fit", *words, "--run_name=cut", command=command, env=variables)
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))
