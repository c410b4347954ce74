"""Several processes and several nodes: how they start, agree, stop, and start again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from harness import KIND, LIMIT, SMALL, Cait, checkpoint, ended, environment, free_port, link_digits, rows, start
from lightning.pytorch import Callback, Trainer
from modules import loader, module, trainer
from runs import ENDLESS, RECIPE, TWO, apart, assert_same, slurm_task, torchrun, wait_for_steps

from cait.errors import UserError
from cait.guards.run_lock import RunLock
from cait.model.network import create_model
from cait.run import program
from cait.run.checkpoints import DurableCheckpointIO, LastCheckpoint
from cait.run.program import Processes
from cait.run.signals import StopSignals


def test_all_processes_hear_the_same_after_the_same_step_however_far_apart_they_are() -> None:
    size, store = 4, dist.HashStore()
    heard: list[list[tuple[int, bool]]] = [[] for _ in range(size)]
    ahead = threading.Semaphore(200)  # steps that process 0 may be ahead of process 2, as a GPU's queue would allow

    def process(rank: int) -> None:
        signals = StopSignals()
        signals.share(store, decides=rank == 0, step=0)
        for step in range(1, 2001):
            if rank == 0:
                assert ahead.acquire(timeout=LIMIT)
            if rank == 2:
                ahead.release()
            if rank == 2 and step == 300:
                signals._note(signal.SIGUSR1, None)
            heard[rank].append(signals.agreed(step, save=rank == 0 and step % 7 == 0, wait=step % 50 != 0))
            if heard[rank][-1][0]:
                return

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT)
    assert heard[0][-1][0] == signal.SIGUSR1
    assert any(save for _, save in heard[0])
    assert all(other == heard[0] for other in heard[1:])
    assert len(heard[0]) < 2000


class Cluster(NamedTuple):
    """A launcher, as far as the processes ask it."""

    rank: int
    port: int = 0
    size: int = 3
    main_address: str = "127.0.0.1"

    def global_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return self.size

    @property
    def main_port(self) -> int:
        return self.port


def together(main: Callable[[Processes, int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each of three processes gets by `main`, a UserError's text among it; threads stand for them."""
    store, found = dist.HashStore(), [None] * 3

    def process(rank: int) -> None:
        processes = Processes()
        processes._store = store
        monkeypatch.setattr(processes, "cluster", lambda: Cluster(rank))
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


def told_by_one(processes: Processes, rank: int) -> list[str]:
    if rank == 2:
        processes.tell("no such file")
        raise UserError("no such file")
    processes.agree()
    return processes.agree()


HOST = socket.gethostname()
SAME = "all processes of a run need the same data, code and settings"
ODD = f"process 1 on {HOST} has --model.lr 0.1, process 0 on {HOST} 0.2: {SAME}"
LACKS = f"process 1 on {HOST} has checkpoint None, process 0 on {HOST} last.ckpt: {SAME}"


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (lambda processes, rank: processes.agree(str(rank)), [["0", "1", "2"]] * 3),
        (
            lambda processes, rank: [processes.agree(f"{n} {rank}")[1] for n in range(9)],
            [[f"{n} 1" for n in range(9)]] * 3,
        ),
        (lambda processes, rank: processes.of_first(lambda: f"of {rank}"), ["of 0"] * 3),
        (lambda processes, rank: processes.compare({"--model.lr": "0.1"}), [None] * 3),
        (lambda processes, rank: processes.compare({"--model.lr": "0.1" if rank else "0.2"}), [ODD] * 3),
        (lambda processes, rank: processes.compare({} if rank == 1 else {"checkpoint": "last.ckpt"}), [LACKS] * 3),
        (
            lambda processes, rank: processes.agree(trouble="full" if rank == 1 else ""),
            [f"process 1 on {HOST}: full"] * 3,
        ),
        (told_by_one, [f"process 2 on {HOST}: no such file"] * 2 + ["no such file"]),
    ],
)
def test_processes_agree_before_they_train(main: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert together(main, monkeypatch) == expected


def test_after_a_restart_nobody_takes_the_store_of_the_start_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's own store still says where the killed process 0 served another."""
    torchruns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchruns.set("cait/port", free_port())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(torchruns.port))
    monkeypatch.setattr(program, "PATIENCE", timedelta(seconds=0.5))
    opened: dict[int, Any] = {}

    def open_store(rank: int) -> None:
        opened[rank] = program._open_store(cast(Any, Cluster(rank, torchruns.port)), timedelta(seconds=LIMIT))

    other = threading.Thread(target=open_store, args=(1,))
    other.start()
    time.sleep(1)  # by now it has tried
    open_store(0)
    other.join(LIMIT)
    opened[0].set("word", "heard")
    assert opened[1].get("word") == b"heard"
    assert os.environ["MASTER_PORT"] == str(opened[0].port) != str(torchruns.port)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # torch takes the same


def test_the_answers_are_cleared_from_the_store() -> None:
    store = dist.HashStore()
    signals = StopSignals()
    signals.share(store, decides=True, step=0)
    for step in range(1, 10):
        signals.agreed(step, wait=False)
    assert store.num_keys() == 9
    signals.forget()
    assert store.num_keys() == 0


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


def test_no_save_comes_between_a_step_and_its_validation(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []

    class Noting(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint: dict, *args: object, **kwargs: object) -> None:
            events.append(("saved", checkpoint["global_step"]))
            super().save_checkpoint(checkpoint, *args, **kwargs)

    class Watching(Callback):
        def on_validation_end(self, trainer: Trainer, *_: object) -> None:
            events.append(("validated", trainer.global_step))

    settings: dict = dict(plugins=[Noting()], enable_checkpointing=True, num_sanity_val_steps=0, max_epochs=2)
    counted: dict = dict(check_val_every_n_epoch=None, val_check_interval=4)  # over the ends of epochs
    callbacks = [Watching(), LastCheckpoint(tmp_path, every_n_steps=1)]
    trainer(callbacks=callbacks, **settings, **counted).fit(module(), loader(), loader(8))  # 6 steps an epoch
    assert [step for what, step in events if what == "validated"] == [4, 8, 12]
    assert [step for what, step in events if what == "saved"] == [*range(1, 13)]
    for step in (4, 8, 12):
        assert events.index(("saved", step)) == events.index(("validated", step)) + 1


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_no_time_to_save(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="save_every_n_minutes must be above 0"):
        LastCheckpoint(tmp_path, every_n_minutes=minutes)


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


def test_a_failed_start_keeps_what_was_made_while_it_waited(tmp_path: Path) -> None:
    held = threading.Event()

    def train() -> None:
        first = RunLock(tmp_path)
        held.set()
        time.sleep(0.3)  # meanwhile the other one waits
        (tmp_path / "metrics.csv").write_text("mine")
        first.release()

    thread = threading.Thread(target=train)
    thread.start()
    held.wait()
    RunLock(tmp_path).roll_back()
    thread.join()
    assert (tmp_path / "metrics.csv").read_text() == "mine"


def test_a_folder_is_held_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    # Its forked child, as a loader's worker, lives on and must not hold the folder.
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom cait.guards.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n    print(os.getppid(), flush=True)\n"  # the child: it has let go of the lock by then
        "time.sleep(3600)"
    )
    (tmp_path / "hold.py").write_text(code)
    folder = tmp_path / "run"
    held = KIND(
        [sys.executable, "hold.py", str(folder)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert held.stdout is not None
    pid = held.stdout.readline().strip()
    try:
        with pytest.raises(UserError, match=rf"is being trained by process {pid} on \S+ since"):
            RunLock(folder)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/.last.ckpt.7.tmp").write_text("half")
        held.kill()
        held.wait()
        lock = RunLock(folder)
        assert not (folder / "checkpoints/.last.ckpt.7.tmp").exists()
        lock.roll_back()
        assert (folder / "checkpoints").exists()  # it was not all ours
    finally:
        os.killpg(held.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_second_resume_leaves_the_first_alone(cait: Cait, tmp_path: Path) -> None:
    one = [*SMALL, "--trainer.max_epochs=1000", "--trainer.log_every_n_steps=1", "--save_every_n_steps=2"]
    job = start(tmp_path, "fit", *one, "--run_name=busy")
    run = tmp_path / "logs/busy"
    try:
        wait_for_steps(run, 5, job)
        before = len(rows(run))
        second = cait("resume", "busy")
        assert second.returncode == 2
        assert re.search(rf"cait: error: logs/busy is being trained by process {job.pid} on ", second.stderr)
        assert "Traceback" not in second.stderr
        wait_for_steps(run, before + 5, job)
        job.kill()  # not its workers
        job.wait()
        on = cait("resume", "busy", f"--trainer.max_epochs={checkpoint(run)['epoch'] + 1}")
        assert on.returncode == 0, on.stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def test_batch_norm_over_all_processes_keeps_its_channels() -> None:
    torch.manual_seed(0)
    model = create_model("xxs24", 32, 7, 0.0, embed_dim=32, depth=2, num_heads=2, norm="batchnorm").train()
    images = torch.randn(4, 3, 32, 32)
    expected = model(images)
    states = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.zeros_like(v) if "running" in key else v for key, v in states.items()})
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    norms = [part for part in synced.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms
    assert all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert synced.state_dict().keys() == states.keys()
    for norm in norms:
        norm.reset_running_stats()
    torch.testing.assert_close(synced(images), expected)  # without other processes it is torch's batch norm
    for key, value in synced.state_dict().items():
        torch.testing.assert_close(value, states[key])


@pytest.mark.slow
def test_two_tasks_of_slurm(cait: Cait, tmp_path: Path) -> None:
    tasks = [slurm_task(tmp_path, rank, "fit", *ENDLESS, "--run_name=cut") for rank in range(2)]
    wait_for_steps(tmp_path / "logs/cut", 3, tasks[0])
    tasks[1].send_signal(signal.SIGUSR1)
    outputs = [job.communicate(timeout=LIMIT)[0] for job in tasks]
    assert [job.returncode for job in tasks] == [138, 138], outputs
    assert "make resume RUN=cut" in outputs[0]
    assert checkpoint(tmp_path / "logs/cut")["global_step"] >= 3


DIFFERS = {
    "folder": (
        [],
        r"process 1 on \S+: logs/cut is not the folder of process .*; all nodes must share it",
    ),
    "images": ([], rf"process 1 on \S+ has training images 1,436 \(\w+\), process 0 on \S+ 1,437 \(\w+\): {SAME}"),
    "setting": (["--model.lr=0.5"], rf"process 1 on \S+ has --model.lr 0.5, process 0 on \S+ 0.002: {SAME}"),
    "start": (["--data.root=nowhere"], r"the data folder nowhere does not exist"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERS)
def test_a_node_that_differs_ends_the_run_of_all_before_its_first_step(
    kind: str, tmp_path: Path, digits_root: Path
) -> None:
    more, says = DIFFERS[kind]
    command = apart(tmp_path, digits_root, *more)
    if kind != "folder":
        (tmp_path / "node0/logs").mkdir()
        (tmp_path / "node1/logs").symlink_to(tmp_path / "node0/logs")
    if kind == "images":
        (data := tmp_path / "node1/data/digits").unlink()
        shutil.copytree(digits_root, data)
        next((data / "train/3").iterdir()).unlink()
    assert re.search(says, error_of(start(tmp_path, "fit", *ENDLESS, "--run_name=cut", command=command)))
    assert not (tmp_path / "node0/logs/cut").exists()  # its name stays free


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no run", "there is no run logs/cut"),
        ("older", r"process 1 on \S+ has checkpoint last.ckpt at step 4, process 0 on \S+ last.ckpt at step 5: "),
        ("torn", "logs/cut/checkpoints/last.ckpt is not a whole checkpoint of a run"),
    ],
)
def test_a_node_that_sees_another_run_ends_the_resume_of_all(
    kind: str, says: str, tmp_path: Path, digits_root: Path
) -> None:
    command = apart(tmp_path, digits_root)
    short = [*ENDLESS, "--trainer.devices=1", "--data.batch_size=64", "--run_name=cut", "--save_every_n_steps=2"]
    job = start(tmp_path / "node0", "fit", *short, "--trainer.max_steps=5", "--trainer.limit_val_batches=1")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    run, other = tmp_path / "node0/logs/cut", tmp_path / "node1/logs/cut"
    if kind != "no run":
        (other / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "config.yaml", other)
        (other / ".owner").hardlink_to(run / ".owner")  # so the lock takes the folders for one
        shutil.copy(run / "checkpoints/previous.ckpt", last := other / "checkpoints/last.ckpt")
        if kind == "torn":
            last.write_bytes(last.read_bytes()[:-5000])
    assert re.search(says, error_of(start(tmp_path, "resume", "cut", *TWO, "--trainer.max_steps=7", command=command)))
    assert checkpoint(run)["global_step"] == 5


def error_of(job: subprocess.Popen[str]) -> str:
    """The error of all processes that came to say one: as one of them said it, or with that one's name in front."""
    output = job.communicate(timeout=LIMIT)[0]
    lines = [line.removeprefix("cait: error: ") for line in output.splitlines() if line.startswith("cait: error:")]
    assert lines, output
    assert job.returncode != 0
    assert "cait/cli" not in output  # no traceback of ours; torchrun shows its own
    shortest = min(lines, key=len)
    assert all(line.endswith(shortest) for line in lines), lines
    return max(lines, key=len)


@pytest.mark.slow
def test_the_first_process_alone_needs_the_key_that_signed_the_run(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, img_size, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(3 * img_size ** 2, num_classes))\n"
    )
    settings = [*ENDLESS, "--model.name=own_net:Net", "--model.fields=null", "--trainer.limit_val_batches=1"]
    alone = ["--trainer.devices=1", "--data.batch_size=64", "--trainer.max_steps=2", "--run_name=own"]
    job = start(tmp_path, "fit", *settings, *alone, env=environment() | {"XDG_CONFIG_HOME": str(tmp_path / "home0")})
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    script = tmp_path / "homes.sh"
    script.write_text(f'XDG_CONFIG_HOME={tmp_path}/home$RANK exec {sys.executable} "$@"\n')
    command = (*torchrun("--standalone", "--no_python"), "bash", str(script))
    again = start(tmp_path, "resume", "own", *TWO, "--trainer.max_steps=4", command=command)
    output = again.communicate(timeout=LIMIT)[0]
    assert again.returncode == 0, output
    assert checkpoint(tmp_path / "logs/own")["global_step"] == 4


@pytest.mark.slow
def test_both_tasks_of_slurm_end_if_the_name_of_the_run_is_taken(tmp_path: Path, digits_root: Path) -> None:
    link_digits(tmp_path, digits_root)
    (tmp_path / "logs/cut/checkpoints").mkdir(parents=True)
    (tmp_path / "logs/cut/checkpoints/last.ckpt").touch()
    tasks = [slurm_task(tmp_path, rank, "fit", *ENDLESS, "--run_name=cut") for rank in range(2)]
    outputs = [job.communicate(timeout=LIMIT)[0] for job in tasks]
    assert [job.returncode for job in tasks] == [2, 2], outputs
    for output, said in zip(outputs, ("logs/cut", r"process 0 on \S+: logs/cut"), strict=True):
        assert re.search(rf"^cait: error: {said} holds a run", output, re.M), output


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_lost_a_process(cait: Cait, tmp_path: Path, place: Path) -> None:
    # Saved by the clock, and inside SLURM, which started torchrun as its one task.
    recipe = [*RECIPE, *TWO, "--save_every_n_steps=null", "--save_every_n_minutes=0.005"]
    slurm = dict(SLURM_NTASKS="1", SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_PROCID="0", SLURM_LOCALID="0")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1", "--standalone")
    job = start(tmp_path, "fit", *recipe, "--run_name=cut", command=torchrun, env=environment() | slurm)
    run = tmp_path / "logs/cut"
    wait_for_steps(run, 26, job)
    workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[1]), signal.SIGKILL)
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode == 0, output
    assert "nothing to do" not in output
    assert_same(run, ended(place, "two", [*RECIPE, *TWO]))


@pytest.fixture
def two_nodes() -> Iterator[list[tuple[str, ...]]]:
    """What runs a command on each of two machines, as far as the network goes; their own names lead to loopback."""
    names = ["cait-a", "cait-b"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "veth-a", "netns", names[0], "type", "veth", "peer", "name", "veth-b", "netns", names[1])
            for name, link, address in ((names[0], "veth-a", "10.77.0.1/24"), (names[1], "veth-b", "10.77.0.2/24")):
                ip("-n", name, "addr", "add", address, "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces here: {error.stderr.decode().strip()}")
        yield [
            ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}")
            for name, link in zip(names, ("veth-a", "veth-b"), strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_nodes_whose_names_lead_to_loopback(cait: Cait, tmp_path: Path, two_nodes: list[tuple[str, ...]]) -> None:
    # DDP connects through the interface that is named, as NCCL finds its own. Then the name is taken away: what
    # else would make a group of Gloo's, must do without.
    unset = ["--trainer.callbacks+=recorder.ForgetInterface"]
    nodes = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.strategy=ddp"]
    recipe = [*ENDLESS, "--trainer.devices=1", *nodes, *unset, "--save_every_n_steps=1000"]

    def launch(*arguments: str) -> list[subprocess.Popen[str]]:
        jobs = []
        for rank, prefix in enumerate(two_nodes):
            options = ("--nnodes=2", f"--node_rank={rank}", "--master_addr=10.77.0.1", "--master_port=29613")
            run = (*prefix, sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *options)
            jobs.append(start(tmp_path, *arguments, command=run))
        return jobs

    run = tmp_path / "logs/cut"
    jobs = launch("fit", *recipe, "--run_name=cut")
    try:
        wait_for_steps(run, 3, jobs[0])
        workers = subprocess.run(["pgrep", "-P", str(jobs[1].pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(workers[0]), signal.SIGUSR1)  # the process of the other node alone
        outputs = [job.communicate(timeout=LIMIT)[0] for job in jobs]
        assert all(job.returncode != 0 for job in jobs)
        assert "make resume RUN=cut" in outputs[0], outputs[0]
        stopped = checkpoint(run)["global_step"]
        assert stopped >= 3
        jobs = launch(
            "resume", "cut", "--trust-config", f"--trainer.max_steps={stopped + 2}", "--trainer.max_epochs=-1"
        )
        outputs = [job.communicate(timeout=LIMIT)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], outputs
        assert checkpoint(run)["global_step"] == stopped + 2
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
