"""Two processes, connected by Gloo, go through the situations of a file; imports and connections are made once.

    python pair.py FILE FOLDER

FILE is a module whose SITUATIONS are functions of the rank and a folder, by name. What each returns, or its error, is
in FOLDER/<rank>.json.
"""

import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import LIMIT, free_port, script
from lightning.pytorch.utilities import rank_zero_only
from torch.multiprocessing import start_processes


def answers(file, folder):
    """What the two processes return, by situation."""
    done = script(__file__, folder, file, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return {name: [answer, second[name]] for name, answer in first.items()}


def process(rank, file, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # which Lightning reads when it is imported
    # a process that waits for the other in vain fails soon
    wait = timedelta(seconds=min(120, LIMIT))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=wait)
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = {}
    for name, situation in module.SITUATIONS.items():
        try:
            told[name] = situation(rank, folder / name)
        except (Exception, pytest.fail.Exception) as error:
            told[name] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    start_processes(process, (sys.argv[1], Path(sys.argv[2])), 2, start_method="fork")
