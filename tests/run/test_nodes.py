"""Several processes and several nodes: how they start, agree, stop, and start again."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import three
import torch
from harness import LIMIT, SMALL, Cait, checkpoint, ended, environment, script, start
from lightning.pytorch import Callback
from modules import loader, module, trainer
from runs import ENDLESS, RECIPE, TWO, assert_same, torchrun, wait_for_steps
from same import same
from together import cluster, together

from cait.errors import UserError
from cait.guards.run_lock import RunLock
from cait.run import meeting, program
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (lambda processes, rank: processes.agree(str(rank)), [["0", "1", "2"]] * 3),
        (lambda processes, rank: processes.from_first(lambda: f"of {rank}"), ["of 0"] * 3),
    ],
)
def test_processes_agree_before_they_train(
    main: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert together(main, monkeypatch) == expected


def test_the_process_that_serves_the_store_waits_for_those_that_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Slow:
        def __init__(self, store: Any) -> None:
            self.store = store

        def multi_get(self, keys: list[str]) -> list[bytes]:
            time.sleep(0.3)
            words = self.store.multi_get(keys)
            events.append("read")
            return words

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    def main(processes: program.Processes, rank: int) -> None:
        if rank == 2:
            processes._store = Slow(processes._store)
        processes.agree()
        if rank == 0:
            events.append("end")

    together(main, monkeypatch)
    assert events == ["read", "end"]


def test_restarts_with_the_store_of_the_start_before_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It still has the addresses of processes that were killed."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        UserError, match="give torchrun the variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    ):
        program._open_store(cluster(1), meeting.WAIT)


def test_a_restart_goes_on_from_the_runs_own_checkpoint_and_not_from_its_start(
    cait: Cait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*SMALL, "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    begun = cait("fit", *short, "--run_name=start", "--trainer.max_epochs=1")
    assert begun.returncode == 0, begun.stderr
    shutil.copytree(tmp_path / "logs/start", tmp_path / "logs/cut")
    (tmp_path / "logs/start/checkpoints/last.ckpt").write_bytes(b"no longer used")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start = "--ckpt_path=logs/start/checkpoints/last.ckpt"
    restarted = cait("fit", *short, "--run_name=cut", start, "--trainer.max_epochs=2")
    assert restarted.returncode == 0, restarted.stderr
    assert checkpoint(tmp_path / "logs/cut")["global_step"] == 4


@pytest.mark.parametrize(("minutes", "saves"), [(1e-9, 6), (None, 1), (100.0, 1)])
def test_saving_by_the_clock(minutes: float | None, saves: int, tmp_path: Path) -> None:
    steps: list[int] = []

    class Counting(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint: dict, *args: object, **kwargs: object) -> None:
            steps.append(checkpoint["global_step"])
            super().save_checkpoint(checkpoint, *args, **kwargs)

    last = LastCheckpoint(tmp_path, every_n_minutes=minutes)
    trainer(max_epochs=1, callbacks=[last], plugins=[Counting()]).fit(module(), loader())
    assert len(steps) == saves  # 6 steps; the last ends the epoch
    assert steps[-1] == 6


def test_a_run_is_finished_until_it_is_continued(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            raise ValueError("in the middle")

    lock, finished = RunLock(tmp_path), tmp_path / ".finished"
    trainer(max_epochs=1, callbacks=[lock]).fit(module(), loader())
    assert finished.exists()
    with pytest.raises(ValueError, match="in the middle"):
        trainer(max_epochs=1, callbacks=[lock, Failing()]).fit(module(), loader())
    assert not finished.exists()


def test_a_folder_is_held_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    # Its forked child, as a loader's worker, lives on and must not hold the folder.
    folder, (heard, say) = tmp_path / "run", os.pipe()
    if not (held := os.fork()):
        try:
            os.setsid()
            lock = RunLock(folder)
            if not os.fork():
                os.write(say, b".")  # the child: it has let go of the lock by then
            signal.pause()
        finally:
            os._exit(1)
    os.read(heard, 1)
    try:
        with pytest.raises(UserError, match="is being trained by another process"):
            RunLock(folder)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/.last.ckpt.7.tmp").write_text("half")
        os.kill(held, signal.SIGKILL)
        os.waitpid(held, 0)
        lock = RunLock(folder)
        assert not (folder / "checkpoints/.last.ckpt.7.tmp").exists()
        lock.roll_back()
        assert (folder / "checkpoints").exists()  # it was not all ours
    finally:
        os.killpg(held, signal.SIGKILL)


def test_a_link_to_an_empty_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir()
    lock.roll_back()
    assert (tmp_path / "run").is_symlink()
    assert not any((tmp_path / "disk").iterdir())


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """Whole runs and resumed ones, all on three processes, see three.py."""
    folder = tmp_path_factory.mktemp("three")
    done = script(three.__file__, None, str(folder), str(digits_root))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", three.RUNS)
def test_a_resumed_run_of_three_processes_ends_with_the_bits_of_one_left_alone(
    run: str, on_three: Path
) -> None:
    whole, resumed = (
        torch.load(on_three / run / name / "last.ckpt") for name in ("whole", "stopped")
    )
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert same(resumed[part], whole[part]), part


@pytest.mark.slow
def test_two_tasks_that_srun_started_in_a_shell_of_salloc(cait: Cait, tmp_path: Path) -> None:
    job = dict(
        NTASKS="2", NTASKS_PER_NODE="2", NNODES="1", JOB_ID="7", JOB_NAME="interactive", NODEID="0"
    )
    job |= dict(STEP_NUM_TASKS="2")
    slurm = {f"SLURM_{name}": value for name, value in job.items()} | {"MASTER_PORT": "29714"}
    slurm |= {"SLURM_NODELIST": "127.0.0.1"}
    tasks = []
    for rank in "01":
        own = environment() | slurm | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        tasks.append(start(tmp_path, "fit", *ENDLESS, "--run_name=cut", env=own))
    wait_for_steps(tmp_path / "logs/cut", 3, tasks[0])
    tasks[1].send_signal(signal.SIGUSR1)
    outputs = [job.communicate(timeout=LIMIT)[0] for job in tasks]
    assert [job.returncode for job in tasks] == [138, 138], outputs
    assert "cait resume cut" in outputs[0]
    assert checkpoint(tmp_path / "logs/cut")["global_step"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), torchrun("--standalone")])
def test_an_error_in_one_process_ends_all_with_a_line(command: tuple[str, ...], cait: Cait) -> None:
    happens = ["--trainer.callbacks+=recorder.Misfortune", "--trainer.callbacks.step=5"]
    happens += ["--trainer.callbacks.what=an error in one process"]
    failed = cait("fit", *SMALL, *TWO, *happens, "--run_name=cut", command=command)
    lines = sorted(line for line in failed.stderr.splitlines() if line.startswith("cait: error: "))
    assert failed.returncode == (1 if command else 2)
    assert "cait/cli" not in failed.stderr  # no traceback of ours; torchrun shows its own
    says = (
        "as of an image that only this process meets",
        "another process of the run has ended, and says why",
    )
    assert len(lines) == 2
    assert all(
        line.endswith(f"{say}; to continue: cait resume cut")
        for line, say in zip(lines, says, strict=True)
    )


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(
    cait: Cait, tmp_path: Path, place: Path
) -> None:
    # Saved by the clock, and inside SLURM, which started torchrun as its one task.
    recipe = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    variables = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # a new store for each start
    variables |= dict(
        SLURM_NTASKS="1",
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="train",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
    )
    command = torchrun("--max-restarts=1", "--standalone")
    job = start(
        tmp_path, "fit", *recipe, "--run_name=cut", command=command, env=environment() | variables
    )
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    workers = subprocess.run(
        ["pgrep", "-P", str(job.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))
