"""Three processes of a run, for which threads stand."""

import threading
from types import SimpleNamespace

import torch.distributed as dist
from harness import LIMIT

from cait.errors import UserError
from cait.run.program import Processes


def cluster(rank):
    """A launcher of three processes, as far as they ask it."""
    return SimpleNamespace(
        global_rank=lambda: rank, world_size=lambda: 3, main_address="127.0.0.1", main_port=0
    )


def together(main, monkeypatch):
    """What each of three processes gets by `main`, a UserError's text among it; threads stand for them."""
    store = dist.HashStore()
    answers = [None] * 3

    def process(rank):
        processes = Processes()
        processes._store = store
        monkeypatch.setattr(processes, "cluster", lambda: cluster(rank))
        try:
            answers[rank] = main(processes, rank)
        except UserError as error:
            answers[rank] = str(error)
            processes.end(str(error))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT)
    return answers
