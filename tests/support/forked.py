"""Processes of `cait` that are forked where they would be started, because the imports take seconds."""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]

asked: socket.socket | None = None
"""The way to a process that forks; None starts zygote.py when it is first needed."""
ASKING = threading.Lock()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO / 'tests/support'}", "COLUMNS": "200"}


def heed_ctrl_c() -> None:
    """A shell that runs the tests in the background has them ignore Ctrl-C, and nohup a hangup: so would their jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


Started = subprocess.Popen
EXECUTE = inspect.signature(Started._execute_child)  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Its arguments, by the names that CPython gives them: their order changes from version to version."""


class Forked(Started):
    """`subprocess.Popen` that has zygote.py fork [sys.executable, "-m", MODULE, ...] and [sys.executable, FILE, ...].

    Anything else it starts.
    """

    def _execute_child(self, args: Any, *others: Any) -> None:
        if not (isinstance(args, list) and args[0] == sys.executable and (args[1] == "-m" or args[1].endswith(".py"))):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        given = EXECUTE.bind(self, args, *others).arguments
        kept, env, pipes = given["pass_fds"], given["env"], [given[name] for name in PIPES]
        streams = [number if pipe < 0 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        cwd, session = str(given["cwd"] or os.getcwd()), given["start_new_session"]
        request = [args[1:], cwd, dict(os.environ if env is None else env), session]
        way = asked or zygote()[0]
        with ASKING:
            socket.send_fds(way, [json.dumps([request, [0, 1, 2, *kept]]).encode()], [*streams, *kept])
            self.pid = int(way.recv(100))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def adopt_orphans() -> None:
    """Make what children of this process fork its own children, which it can wait for (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


@functools.cache
def zygote() -> tuple[socket.socket, subprocess.Popen]:
    """Start zygote.py."""
    adopt_orphans()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = Started(
            [sys.executable, str(REPO / "tests/support/zygote.py"), str(theirs.fileno())],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            preexec_fn=heed_ctrl_c,
            start_new_session=True,
        )
    return ours, process
