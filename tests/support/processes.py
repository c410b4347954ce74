"""`cait` in forked processes, which need not import torch again, and in several as torchrun starts them."""

import json
import os
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import harness


def run(folder, *arguments, processes=1):
    """Run `cait` in a folder. The status is the first that is not 0; what is said is the first process's."""
    port = harness.free_port()
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, str(rank)) for rank in range(processes)]
        wait(
            [
                forked(partial(call, folder, arguments, rank, processes, port), file)
                for rank, file in enumerate(files)
            ]
        )
        for file in files:
            answers.append(json.loads(file.read_text()) if file.exists() else [-1, "", "no answer"])
    first = answers[0]
    status, _, error = next((answer for answer in answers if answer[0]), first)
    return CompletedProcess(arguments, status, first[1], error)


def apart(function):
    """Call a function in a forked process and return what it gives, as JSON has it.

    A process that has gone backward once cannot be forked any more into ones that train, and some verbs do.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "answer")
        os.waitpid(forked(function, file), 0)
        return json.loads(file.read_text())


def forked(function, file):
    """Start a process that calls a function and writes what it gives into the file; returns its number."""
    import torch.utils.tensorboard  # noqa: F401  # once for all

    import cait.cli.lightning  # noqa: F401

    child = os.fork()
    if child:
        return child
    status = 1
    try:
        file.write_text(json.dumps(function()))
        status = 0
    except BaseException:
        file.write_text(json.dumps([1, "", traceback.format_exc()]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def call(folder, arguments, rank, processes, port):
    """(status, output, errors) of `cait` in this process, which is one of several."""
    from lightning.pytorch.utilities import rank_zero_only

    if processes > 1:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # which Lightning reads when it is imported
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(processes),
            LOCAL_WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            TORCHELASTIC_RUN_ID="laws",
        )
    harness.takes_several_processes = lambda *_: False
    done = harness.call(folder, *arguments)
    return done.returncode, done.stdout, done.stderr


def wait(waiting):
    """Wait for all. If one has failed the others end, as under torchrun, or else are killed."""
    end = time.monotonic() + harness.LIMIT
    while waiting:
        for child in [*waiting]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                waiting.remove(child)
                end = min(end, time.monotonic() + 120) if status else end
        if time.monotonic() > end:
            for child in waiting:
                os.kill(child, 9)
        time.sleep(0.02)
