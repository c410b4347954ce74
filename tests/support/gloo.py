"""Several processes, connected by Gloo, go through the situations of a file; imports and connections are made once.

    python gloo.py FILE TABLE FOLDER PROCESSES

TABLE is a dictionary in FILE of functions of the rank and a folder, by name. What each returns, or its error, is in
FOLDER/<rank>.json.
"""

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import modules  # noqa: F401  # once for all processes, as it takes long
import pytest
import torch.distributed as dist
from harness import LIMIT, free_port, parsed, script, works
from lightning.pytorch.utilities import rank_zero_only
from torch.multiprocessing import start_processes


def run(file, table, processes, folder):
    """Have so many processes go through the situations."""
    works(script(__file__, folder, file, table, folder, str(processes)))


def answers(folder):
    """What each process returned, by situation."""
    ranks = [parsed(path) for path in sorted(folder.glob("[0-9].json"))]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def process(rank, file, table, folder, processes):
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(processes)}
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # which Lightning reads when it is imported
    # a process that waits for the others in vain fails soon
    wait = timedelta(seconds=min(120, LIMIT))
    dist.init_process_group("gloo", rank=rank, world_size=processes, timeout=wait)
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.import_module(Path(file).stem)
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
