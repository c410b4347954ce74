"""A forked `cait` is what a started one is: the tests that use it would show nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Forked, environment, heed_ctrl_c

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are started here, not forked")

TELL = """
import atexit, json, os, random, signal, sys
about = {
    "name": [__name__, __spec__.name, __file__, sys.modules["__main__"].__dict__ is globals()],
    "argv": sys.argv,
    "path": sys.path,
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "input": sys.stdin.read(),
    "leads": [os.getpid() == os.getpgrp() == os.getsid(0), os.getppid()],
    "files": sorted(os.listdir("/proc/self/fd"))[:4],
    "signals": [str(signal.getsignal(kind)) for kind in (2, 10, 13, 15)],
    "streams": [sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.line_buffering],
}
drawn = [random.random()]
if sys.argv[1] == "exit":
    import numpy as np, torch
    about["torch"] = [torch.get_num_threads(), torch.ones(500, 500).mm(torch.ones(500, 500)).sum().item()]
    drawn += [np.random.rand(), torch.rand(()).item()]
print(json.dumps([about, drawn]))
print("to stderr", file=sys.stderr)
atexit.register(print, "at the end")
raise {"exit": SystemExit(7), "error": ValueError("wrong"), "interrupt": KeyboardInterrupt}[sys.argv[1]]
"""


@pytest.mark.slow
def test_what_is_forked_is_as_what_is_started(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    found = []
    for end in ("exit", "error", "interrupt"):
        for kind in (subprocess.Popen, Forked, Forked):
            job = kind(
                [sys.executable, "-m", "tell", end, "two words"],
                cwd=tmp_path,
                env=environment() | {"MINE": "é"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=heed_ctrl_c,
                start_new_session=True,
            )
            out, err = job.communicate("é\n")
            first, *rest = out.splitlines()
            about, drawn = json.loads(first)
            about["env"].pop("LC_CTYPE", None)  # as the interpreter may set it at its start
            told = (about, rest, err.splitlines()[0], err.splitlines()[-1], job.returncode)
            found.append((told, drawn))
        (started, a), (forked, b), (again, c) = found[-3:]
        assert [*forked[0].items(), *forked[1:]] == [*started[0].items(), *started[1:]]
        assert again == forked
        assert len({*a, *b, *c}) == 3 * len(a)  # numbers that are drawn without a seed
    assert [told[-1] for told, _ in found[::3]] == [7, 1, -signal.SIGINT]
    assert found[0][0][0]["leads"] == [True, os.getpid()]


def test_a_forked_process_is_killed_and_waited_for_as_any(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)\n")
    command = [sys.executable, "-m", "idle"]
    options = dict(cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    jobs = [Forked(command, **options) for _ in range(2)]
    for job, signum in zip(jobs, (signal.SIGKILL, signal.SIGTERM), strict=True):
        assert job.stdout.readline() == "begun\n"
        assert job.poll() is None
        os.killpg(job.pid, signum)
        assert job.stdout.read() == ""
        assert job.wait() == -signum
