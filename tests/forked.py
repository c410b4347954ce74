"""Processes of `cait` that are forked where they would be started, because the imports take seconds."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent

asked: socket.socket | None = None
"""The way to a process that forks; None starts zygote.py when it is first needed."""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO / 'tests'}", "COLUMNS": "200"}


def heed_ctrl_c() -> None:
    """A shell that runs the tests in the background has them ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Forked(subprocess.Popen):
    """`subprocess.Popen` of [sys.executable, "-m", module, ...], forked by zygote.py."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        cwd, env, pipes, session = others[4], others[5], others[9:15], others[20]
        streams = [number if pipe < 0 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = [args[2], args[3:], str(cwd or os.getcwd()), dict(env), session]
        way = asked or zygote()[0]
        socket.send_fds(way, [json.dumps(request).encode()], streams)
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
        process = subprocess.Popen(
            [sys.executable, str(REPO / "tests/zygote.py"), str(theirs.fileno())],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            preexec_fn=heed_ctrl_c,
            start_new_session=True,
        )
    return ours, process
