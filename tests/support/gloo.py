"""Several processes, connected by Gloo, go through the situations of a file; imports and connections are made once.

    python gloo.py FILE TABLE FOLDER PROCESSES

TABLE is a dictionary in FILE of functions of the rank and a folder, by name. What each returns, or its error, is in
FOLDER/<rank>.json.
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


def answers(file, table, folder, processes):
    """What the processes return, by situation."""
    done = script(__file__, folder, file, table, str(folder), str(processes))
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def process(rank, file, table, folder, processes):
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(processes)}
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # which Lightning reads when it is imported
    # a process that waits for the others in vain fails soon
    wait = timedelta(seconds=min(120, LIMIT))
    dist.init_process_group("gloo", rank=rank, world_size=processes, timeout=wait)
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    returned = {}
    for name, situation in getattr(module, table).items():
        try:
            returned[name] = situation(rank, folder / name)
        except (Exception, pytest.fail.Exception) as error:
            returned[name] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(returned))


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    file, table, folder, processes = sys.argv[1:]
    arguments = (file, table, Path(folder), int(processes))
    start_processes(process, arguments, int(processes), start_method="fork")
