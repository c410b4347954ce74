"""Workers hand over their batches in memory that is used again and again.

PyTorch sends each batch in new memory, which the system must clear and map page by page: a tenth of a worker's time.
That memory also lies in /dev/shm, which containers keep small. Without this folder batches go PyTorch's way.
"""

from typing import Any


def batch_memory(workers: int, ready: int, size: int) -> Any:
    from cait.extras.shared_memory.batches import HELD, SharedBatches

    return SharedBatches(workers, ready + HELD, size) if SharedBatches.possible() else None
