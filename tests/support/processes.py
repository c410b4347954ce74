"""`cait` in forked processes, which need not import torch again, and in several as torchrun starts them."""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import harness


def run(folder: Path, *arguments: str, processes: int = 1) -> CompletedProcess[str]:
    """Run `cait` in a folder. The status is the first that is not 0; what is said is the first process's."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, str(rank)) for rank in range(processes)]
        port = harness.free_port()
        started = [
            _start(folder, arguments, file, rank, processes, port)
            for rank, file in enumerate(files)
        ]
        _wait(started)
        told = [
            json.loads(file.read_text()) if file.exists() else [-1, "", "no answer"]
            for file in files
        ]
    status = next((code for code, *_ in told if code), 0)
    errors = [err for code, _, err in told if code] or [told[0][2]]
    return CompletedProcess(arguments, status, told[0][1], errors[0])


def apart(function: Callable[[], Any]) -> Any:
    """Call a function in a forked process and return what it gives, as JSON has it.

    A process that has gone backward once cannot be forked any more into ones that train, and some verbs do.
    """
    import cait.cli.lightning  # noqa: F401  # once for all

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "found")
        if not (child := os.fork()):
            try:
                file.write_text(json.dumps(function()))
            except BaseException:
                file.write_text(json.dumps([traceback.format_exc()]))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return json.loads(file.read_text())


def _start(
    folder: Path, arguments: tuple[str, ...], file: Path, rank: int, processes: int, port: str
) -> int:
    from lightning.pytorch.utilities import rank_zero_only

    import cait.cli.lightning  # noqa: F401  # once for all

    if child := os.fork():
        return child
    status = 1
    try:
        if processes > 1:
            launched = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": processes,
                "LOCAL_WORLD_SIZE": processes,
            }
            places = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "laws",
            }
            rank_zero_only.rank = rank  # type: ignore[attr-defined]  # which Lightning reads when it is imported
            os.environ.update(
                {name: str(value) for name, value in launched.items()}
                | places
                | {"GROUP_RANK": "0"}
            )
        harness.takes_several_processes = lambda *_: False
        done = harness.call(folder, *arguments)
        file.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
        status = 0
    except BaseException:
        file.write_text(json.dumps([1, "", traceback.format_exc()]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(started: list[int]) -> None:
    """Wait for all. If one has failed the others end, as under torchrun, or else are killed."""
    waiting, end = list(started), time.monotonic() + harness.LIMIT
    while waiting:
        for child in list(waiting):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                waiting.remove(child)
                end = min(end, time.monotonic() + 120) if status else end
        if time.monotonic() > end:
            for child in waiting:
                os.kill(child, 9)
        time.sleep(0.02)
