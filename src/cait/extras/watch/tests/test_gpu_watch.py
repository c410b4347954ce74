"""A process that waits for its GPU still ends when another is lost. `make bench-gpu` runs it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, free_port

from cait.extras.watch.watch import Place, Watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def run(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    torch.zeros(1, device="cuda")
    store.set(f"ready {rank}", "")
    store.wait([f"ready {1 - rank}"])
    Watch(store, Place(rank, 2, rank), limit=5.0).start()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda._sleep(10**14)  # as a kernel of NCCL whose peer is gone
    torch.cuda.synchronize()


def test_a_process_that_waits_for_its_gpu_ends(capfd: pytest.CaptureFixture[str]) -> None:
    port = int(free_port())
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = [context.Process(target=run, args=(rank, port)) for rank in range(2)]
    for process in processes:
        process.start()
    processes[0].join(LIMIT)
    ended = processes[0].exitcode
    for process in processes:
        process.kill()
        process.join()
    assert ended == 1
    assert f"process 1 on {socket.gethostname()}: no answer" in capfd.readouterr().err
