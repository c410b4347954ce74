"""One process of several fails, dies or falls silent: all end, soon, with an error, and the cause is said once."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from harness import LIMIT, SMALL, free_port, python, slow, start
from modules import trainer
from runs import TWO

from cait.data.datamodule import ImageNetDataModule
from cait.data.sampler import TrainBatchSampler
from cait.errors import UserError
from cait.extras.watch import watch
from cait.extras.watch.processes import WatchedProcesses
from cait.extras.watch.watch import Place, Watch, is_of_the_network

HOST = socket.gethostname()
Main = Callable[[Watch, int], None]


def sleep(watcher: Watch, rank: int) -> None:
    """As in a collective that does not return."""
    time.sleep(LIMIT)


class Processes:
    """Three processes that watch each other while they run `main`."""

    def __init__(self, folder: Path, main: Main, limit: float) -> None:
        self.port = int(free_port())
        self.folder, self.main, self.limit = folder, main, limit
        context = multiprocessing.get_context("fork")
        self.all: list[BaseProcess] = [context.Process(target=self._run, args=(rank,)) for rank in range(3)]
        for process in self.all:
            process.start()
        for rank in range(3):
            while not (folder / f"ready {rank}").exists():
                time.sleep(0.05)

    def _run(self, rank: int) -> None:
        os.dup2(os.open(self.folder / f"said {rank}", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        patience = timedelta(seconds=LIMIT)
        store = dist.TCPStore("127.0.0.1", self.port, is_master=rank == 0, wait_for_workers=False, timeout=patience)
        watcher = Watch(store.clone(), Place(rank, 3, rank), self.limit)
        watcher.start()
        while watcher._read().keys() != {0, 1, 2}:
            time.sleep(0.05)
        (self.folder / f"ready {rank}").touch()
        self.main(watcher, rank)

    def ended(self, *ranks: int) -> list[int | None]:
        for rank in ranks:
            self.all[rank].join(LIMIT)
        codes = [self.all[rank].exitcode for rank in ranks]
        for process in self.all:
            process.kill()
            process.join()
        return codes

    def said(self) -> list[str]:
        return ["".join(path.read_text() for path in self.folder.glob(f"said {rank}")) for rank in range(3)]


def test_the_first_that_fails_says_why_and_ends_all(tmp_path: Path) -> None:
    def main(watcher: Watch, rank: int) -> None:
        if rank == 0:
            sleep(watcher, rank)
        if watcher.is_first():
            watch.print_error(f"trouble of {rank}")
            watcher.tell(f"trouble of {rank}", 2)
        watcher.leave(2)

    processes = Processes(tmp_path, main, limit=LIMIT)
    assert processes.ended(0, 1, 2) == [2, 2, 2]
    assert sorted(processes.said()) in [["", "", f"cait: error: trouble of {rank}\n"] for rank in (1, 2)]


@pytest.mark.parametrize("silent", [1, *slow(0)])
def test_a_stopped_process_ends_the_others_and_is_named(silent: int, tmp_path: Path) -> None:
    processes = Processes(tmp_path, sleep, limit=15.0)  # far above what a busy machine holds up a healthy one
    os.kill(processes.all[silent].pid, signal.SIGSTOP)
    assert processes.ended(*{0, 1, 2} - {silent}) == [1, 1]
    said = processes.said()
    assert re.fullmatch(rf"cait: error: process {silent} on {HOST}: no answer for \d+ s; .*\n", said.pop(1 - silent))
    assert said == ["", ""]


@pytest.mark.slow
def test_a_process_may_go_on_after_process_0_has_ended(tmp_path: Path) -> None:
    def main(watcher: Watch, rank: int) -> None:
        if rank > 0:
            assert watcher._over.wait(LIMIT)
            time.sleep(2 * watcher.limit)
        watcher.stop()

    assert Processes(tmp_path, main, limit=15.0).ended(0, 1, 2) == [0, 0, 0]


def test_a_killed_process_is_found_behind_the_broken_connection(tmp_path: Path) -> None:
    def main(watcher: Watch, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        WatchedProcesses()._end(watcher, RuntimeError("gloo: Connection closed by peer"), None)

    processes = Processes(tmp_path, main, limit=LIMIT)
    assert processes.ended(0, 1, 2) == [1, -9, 1]
    told = rf"cait: error: process 1 on {HOST}: no answer for \d+ s; it was killed .*\n"
    assert re.fullmatch(told, "".join(processes.said()))


def test_a_process_ends_though_nobody_reads_its_output(tmp_path: Path) -> None:
    def main(watcher: Watch, rank: int) -> None:
        if rank == 1:
            watcher.tell("trouble of 1", 1)
            watcher.leave(1)
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = sys.stderr = os.fdopen(writer, "w")
        sys.stdout.write("a line that is left")
        sleep(watcher, rank)

    assert Processes(tmp_path, main, limit=LIMIT).ended(0, 1, 2) == [1, 1, 1]


def test_a_process_that_falls_silent_at_once_is_named_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("process 0", "7 node-0")
    monkeypatch.setattr(watch.Watch, "_beat", lambda self: None)  # it is stopped before it gives a sign
    monkeypatch.setattr(watch.Watch, "_judge", lambda self: None)
    Watch(store, Place(1, 2, 0), limit=LIMIT).start()
    assert store.get("beat 1").decode().split()[1:] == [HOST]


def test_a_process_that_is_done_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.01)
    store = dist.HashStore()
    store.set("beat 1", "done")
    store.set("beat 2", "7 node-2")
    watcher, found = Watch(store, Place(0, 3, 0), limit=0.5), threading.Event()
    said: list[str] = []
    monkeypatch.setattr(watch, "print_error", said.append)
    monkeypatch.setattr(watcher, "leave", lambda status: (found.set(), watcher._over.set()))
    watcher.start()
    try:
        assert found.wait(LIMIT)
        assert said[0].startswith("process 2 on node-2: no answer for")
    finally:
        watcher.stop()
    assert store.get("beat 0") == b"done"


def test_which_errors_are_of_the_network() -> None:
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    assert is_of_the_network(RuntimeError(text))
    assert is_of_the_network(dist.DistNetworkError("reset"))
    assert not is_of_the_network(dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"))
    assert not is_of_the_network(RuntimeError("shape mismatch"))
    assert not is_of_the_network(ValueError("gloo"))


@pytest.mark.parametrize("silence", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(silence: float) -> None:
    with pytest.raises(UserError, match="silence_seconds must be above 0 or null, got"):
        WatchedProcesses().connect(trainer(), SimpleNamespace(silence_seconds=silence))


def test_an_unreadable_image_too_many_on_one_of_two_processes_is_all_that_is_said(
    tmp_path: Path, digits_root: Path
) -> None:
    (tmp_path / "data").mkdir()
    shutil.copytree(digits_root, tmp_path / "data/digits")
    samples = ImageNetDataModule(root=str(tmp_path / "data/digits")).source.train
    keys = TrainBatchSampler(len(samples), 32, seed=0, rank=1, world_size=2)
    index = next(iter(keys))[7][1]
    bad = Path(samples.name(index))
    bad.write_bytes(bad.read_bytes()[:60])  # with a whole header
    job = start(tmp_path, "fit", *SMALL, *TWO, "--trainer.max_epochs=1000", "--data.max_bad_share=0", "--run_name=bad")
    output = job.communicate(timeout=LIMIT)[0]
    assert job.returncode not in (0, None), output
    assert len(re.findall(r"^cait: error: .*1 images cannot be read, 0 are allowed", output, re.M)) == 1, output
    assert output.count("cait: error") == 1
    assert "Traceback" not in output


def test_process_0_may_hold_more_sockets_than_the_usual_limit_allows() -> None:
    code = (
        "import resource\n"
        "from types import SimpleNamespace\n"
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from cait.extras.watch.processes import _open_store\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        f"here = dict(main_address='127.0.0.1', main_port={free_port()})\n"
        "store = _open_store(SimpleNamespace(**here, global_rank=lambda: 0))\n"
        "others = [TCPStore('127.0.0.1', store.port, timeout=timedelta(seconds=30)) for _ in range(60)]\n"
        "others[-1].set('word', 'heard')\n"
        "print(store.get('word'), resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)"
    )
    done = python(code)
    assert done.stdout == "b'heard' True\n", done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_no_process_but_the_one_that_serves_it_keeps_the_store_of_the_start(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, still_open = WatchedProcesses(), []
    processes._store = dist.HashStore()
    monkeypatch.setattr(processes, "agree", lambda: [])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: SimpleNamespace(clone=dist.HashStore))
    monkeypatch.setattr(watch, "Watch", lambda *_: SimpleNamespace(start=lambda: None))
    connect = SimpleNamespace(setup_environment=lambda: still_open.append(processes._store is not None), launcher=None)
    fit: Any = SimpleNamespace(world_size=2, global_rank=rank, local_rank=rank, global_step=0, strategy=connect)
    processes.connect(fit, SimpleNamespace(silence_seconds=60.0))
    fit.strategy.setup_environment()
    assert still_open == [rank == 0]  # before the processes connect, which opens the other sockets
