"""A process that has imported all that `cait` does, and forks for each call: `python -m cait` in milliseconds.

conftest.py starts it and asks it. The tests' own process cannot fork: its OpenMP threads would not be there
afterwards. This process runs none, it only imports.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import forked

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `cait` has it, before torch is loaded
status = 1


def leave() -> None:
    """End without taking each object of all these modules apart, which would take two seconds."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def serve(requests: socket.socket) -> list:
    """Answer each request with the id of a new process; return the request in that process, and never in this one."""
    while True:
        message, received, *_ = socket.recv_fds(requests, 1 << 20, 10)
        if not message:  # the tests have ended
            os._exit(0)
        ours, theirs = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # from now on its child is the tests' own, which they can wait for
            requests.send(os.read(ours, 100))
            for file in (ours, theirs, *received):
                os.close(file)
            continue
        if child := os.fork():
            os.write(theirs, str(child).encode())
            os._exit(0)
        request, numbers = json.loads(message)
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in received]  # where no number is wanted
        for file in (ours, theirs, *received):
            os.close(file)
        requests.close()
        for file, number in zip(above, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        return request


def become(request: list) -> Callable[[], Any]:
    """Take on the request; returns what runs its module or its file."""
    arguments, cwd, env, session = request
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    numpy.random.seed()  # each process has draws of its own, as of Python's generator after a fork
    torch.default_generator.seed()
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # as when it is imported
    if arguments[0] == "-m":
        sys.argv, sys.path = ["-m", *arguments[2:]], [cwd, *PATH]
        return functools.partial(runpy.run_module, arguments[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path = arguments, [os.path.dirname(os.path.abspath(arguments[0])), *PATH]
    return functools.partial(runpy.run_path, arguments[0], run_name="__main__")


def fork_for_others() -> list | None:
    """Let a copy of this process fork those that `cait` starts, as of the other devices, before any thread begins.

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
    subprocess.Popen = forked.Forked
    return None


# What a run imports at once and what it imports later.
MODULES = ("cait.cli.lightning", "sklearn.datasets", "torch.utils.tensorboard")

if __name__ == "__main__":
    PATH = sys.path[1:]
    atexit.register(leave)  # before all others, so that it runs after them
    warned: list[tuple] = []
    show, warnings.showwarning = warnings.showwarning, lambda *about: warned.append(about)
    import numpy
    import torch

    for name in MODULES:
        importlib.import_module(name)
    from lightning.fabric.utilities import rank_zero

    warnings.showwarning = show
    run = become(serve(socket.socket(fileno=int(sys.argv[1]))))
    if request := fork_for_others():
        run = become(request)
    for about in warned:  # as when they are imported
        show(*about)
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:  # the interpreter then kills itself with SIGINT, at the very end
        atexit.unregister(leave)
        raise
