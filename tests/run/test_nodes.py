"""Several processes and several nodes: how they start, agree, stop, and start again."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import three
import torch
import torch.distributed as dist
from harness import LIMIT, SMALL, Cait, checkpoint, ended, environment, link_digits, script, start
from lightning.pytorch import Callback
from modules import loader, module, trainer
from runs import ENDLESS, RECIPE, TWO, assert_same, torchrun, wait_for_steps
from same import same

from cait.errors import UserError
from cait.guards.run_lock import RunLock
from cait.run import program
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.run.program import Processes


def cluster(rank: int) -> Any:
    """A launcher of three processes, as far as they ask it."""
    return SimpleNamespace(global_rank=lambda: rank, world_size=lambda: 3, main_address="127.0.0.1", main_port=0)


def together(main: Callable[[Processes, int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each of three processes gets by `main`, a UserError's text among it; threads stand for them."""
    store, found = dist.HashStore(), [None] * 3

    def process(rank: int) -> None:
        processes = Processes()
        processes._store = store
        monkeypatch.setattr(processes, "cluster", lambda: cluster(rank))
        try:
            found[rank] = main(processes, rank)
        except UserError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT)
    return found


HOST = socket.gethostname()
SAME = "all processes of a run need the same data, code and settings"
ODD = f"process 1 on {HOST} has --model.lr 0.1, process 0 on {HOST} 0.2: {SAME}"
LACKS = f"process 1 on {HOST} has checkpoint None, process 0 on {HOST} last.ckpt: {SAME}"


def failing() -> None:
    raise UserError("no image")


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (lambda processes, rank: processes.agree(str(rank)), [["0", "1", "2"]] * 3),
        (lambda processes, rank: processes.of_first(lambda: f"of {rank}"), ["of 0"] * 3),
        (lambda processes, rank: processes.of_machine("here", lambda: rank), [0] * 3),
        (lambda processes, rank: processes.of_machine("apart"[rank > 0 :], lambda: {rank}), [{0}, {1}, {1}]),
        (lambda processes, rank: processes.of_machine("here", failing), ["no image"] * 3),
        (lambda processes, rank: processes.of_machine(str(rank), failing if rank == 2 else str), ["no image"] * 3),
        (lambda processes, rank: processes.compare({"--model.lr": "0.1"}), [None] * 3),
        (lambda processes, rank: processes.compare({"--model.lr": "0.1" if rank else "0.2"}), [ODD] * 3),
        (lambda processes, rank: processes.compare({} if rank == 1 else {"checkpoint": "last.ckpt"}), [LACKS] * 3),
    ],
)
def test_processes_agree_before_they_train(main: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert together(main, monkeypatch) == expected


def test_restarts_with_the_store_of_the_start_before_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still has the addresses of processes that were killed."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="give torchrun the variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        program._open_store(cluster(1))


@pytest.mark.parametrize(("minutes", "saves"), [(1e-9, 6), (None, 1), (100.0, 1)])
def test_saving_by_the_clock(minutes: float | None, saves: int, tmp_path: Path) -> None:
    steps: list[int] = []

    class Counting(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint: dict, *args: object, **kwargs: object) -> None:
            steps.append(checkpoint["global_step"])
            super().save_checkpoint(checkpoint, *args, **kwargs)

    last = LastCheckpoint(tmp_path, every_n_minutes=minutes)
    trainer(max_epochs=1, callbacks=[last], plugins=[Counting()], enable_checkpointing=True).fit(module(), loader())
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
def test_a_resumed_run_of_three_processes_ends_with_the_bits_of_one_left_alone(run: str, on_three: Path) -> None:
    whole, resumed = (torch.load(on_three / run / name / "last.ckpt") for name in ("whole", "stopped"))
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert same(resumed[part], whole[part]), part


@pytest.mark.slow
def test_two_tasks_that_srun_started_in_a_shell_of_salloc(cait: Cait, tmp_path: Path) -> None:
    job = dict(NTASKS="2", NTASKS_PER_NODE="2", NNODES="1", JOB_ID="7", JOB_NAME="interactive", NODEID="0")
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
def test_a_node_that_differs_ends_the_run_of_all_before_its_first_step(tmp_path: Path, digits_root: Path) -> None:
    for rank in range(2):  # each works in a folder of its own, as on a node with a disk of its own
        (tmp_path / f"node{rank}").mkdir()
        link_digits(tmp_path / f"node{rank}", digits_root)
    (tmp_path / "apart.sh").write_text(f'cd {tmp_path}/node$RANK && exec {sys.executable} "$@"\n')
    command = (*torchrun("--standalone", "--no_python"), "bash", str(tmp_path / "apart.sh"))
    (tmp_path / "node0/logs").mkdir()
    (tmp_path / "node1/logs").symlink_to(tmp_path / "node0/logs")
    (data := tmp_path / "node1/data/digits").unlink()
    shutil.copytree(digits_root, data)
    next((data / "train/3").iterdir()).unlink()
    says = rf"process 1 on \S+ has training images 1,436 \(\w+\), process 0 on \S+ 1,437 \(\w+\): {SAME}"
    assert re.search(says, error_of(start(tmp_path, "fit", *ENDLESS, "--run_name=cut", command=command)))
    assert not (tmp_path / "node0/logs/cut").exists()  # its name stays free


def error_of(job: subprocess.Popen[str]) -> str:
    """The error of all processes that came to say one: as one of them said it, or with that one's name in front."""
    output = job.communicate(timeout=LIMIT)[0]
    lines = [line.removeprefix("cait: error: ") for line in output.splitlines() if line.startswith("cait: error:")]
    assert lines, output
    assert job.returncode != 0
    assert "cait/cli" not in output  # no traceback of ours; torchrun shows its own
    assert all(line.endswith(min(lines, key=len)) for line in lines), lines
    return max(lines, key=len)


WATCHED = """
import os, sys, threading
from lightning.pytorch import Callback

class Nothing(Callback):
    pass

def look(event, arguments):
    in_thread = threading.current_thread() is not threading.main_thread()
    if event == "os.scandir" and in_thread and str(arguments[0]).endswith("digits/train/3"):
        open(f"listed by {os.environ.get('RANK')}", "a").close()

sys.addaudithook(look)
"""
"""Notes which process lists the images of a class, in a thread; Python reads it before there is a source of images."""


@pytest.mark.slow
def test_torchruns_processes_train_one_run_by_a_recipe_for_one_device(cait: Cait, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    recipe = [*SMALL, "--trainer.max_epochs=1", "--run_name=one", "--trainer.callbacks+=watched.Nothing"]
    done = cait("fit", *recipe, command=torchrun("--standalone"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("listed by *")} == {"listed by 0"}
    assert done.stdout.count("epoch 1/1") == 1
    assert "64 = 2 processes × 32 images" in done.stdout
    resumed = cait("resume", "one", "--trainer.max_epochs=2")  # without torchrun: Lightning starts both
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoint(tmp_path / "logs/one")["global_step"] == 44


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), torchrun("--standalone")])
def test_an_error_in_one_process_ends_all_with_a_line(command: tuple[str, ...], cait: Cait) -> None:
    happens = ["--trainer.callbacks+=recorder.Misfortune", "--trainer.callbacks.step=5"]
    happens += ["--trainer.callbacks.what=an error in one process"]
    failed = cait("fit", *SMALL, *TWO, *happens, "--run_name=cut", command=command)
    lines = sorted(line for line in failed.stderr.splitlines() if line.startswith("cait: error: "))
    assert failed.returncode == (1 if command else 2)
    assert "cait/cli" not in failed.stderr  # no traceback of ours; torchrun shows its own
    says = ("as of an image that only this process meets", "another process of the run has ended, and says why")
    assert len(lines) == 2
    assert all(line.endswith(f"{say}; to continue: cait resume cut") for line, say in zip(lines, says, strict=True))


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(cait: Cait, tmp_path: Path, place: Path) -> None:
    # Saved by the clock, and inside SLURM, which started torchrun as its one task.
    recipe = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    variables = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # a new store for each start
    variables |= dict(SLURM_NTASKS="1", SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_PROCID="0", SLURM_LOCALID="0")
    command = torchrun("--max-restarts=1", "--standalone")
    job = start(tmp_path, "fit", *recipe, "--run_name=cut", command=command, env=environment() | variables)
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))
