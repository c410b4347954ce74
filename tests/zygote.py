"""A process that has imported all that `cait` does, and forks for each call: `python -m cait` in milliseconds.

conftest.py starts it and asks it. The tests' own process cannot fork: its OpenMP threads would not be there
afterwards. This process runs none, it only imports.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `cait` has it, before torch is loaded

import forked
import numpy
import torch


def serve(requests: socket.socket) -> list:
    """Answer each request with the id of a new process; return the request in that process, and never in this one."""
    while True:
        request, streams, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:  # the tests have ended
            os._exit(0)
        ours, theirs = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # from now on its child is the tests' own, which they can wait for
            requests.send(os.read(ours, 100))
            for file in (ours, theirs, *streams):
                os.close(file)
            continue
        if child := os.fork():
            os.write(theirs, str(child).encode())
            os._exit(0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for file in (ours, theirs, *streams):
            os.close(file)
        requests.close()
        return json.loads(request)


def become(request: list) -> str:
    """Take on the request; returns the module to run."""
    module, arguments, cwd, env, session = request
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path = ["-m", *arguments], [cwd, *PATH]
    numpy.random.seed()  # each process has draws of its own, as of Python's generator after a fork
    torch.default_generator.seed()
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as when it is imported
    return module


def fork_for_lightning() -> list | None:
    """Let Lightning fork the processes of the other devices from a copy of this one, before any thread begins.

    Returns the request in such a process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all
        request = serve(theirs)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return request
    theirs.close()
    forked.asked = ours
    forked.adopt_orphans()
    subprocess_script.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": forked.Forked})
    return None


# What a run imports at once and what it imports later.
MODULES = ("cait.lightning_cli", "sklearn.datasets", "torch.utils.tensorboard")

if __name__ == "__main__":
    PATH = sys.path[1:]
    for name in MODULES:
        importlib.import_module(name)
    from lightning.fabric.utilities import rank_zero
    from lightning.pytorch.strategies.launchers import subprocess_script

    module = become(serve(socket.socket(fileno=int(sys.argv[1]))))
    if request := fork_for_lightning():
        module = become(request)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
