"""One thread for a small network on the CPU, which is faster there."""

from typing import Any


def step_callbacks(module: Any, data: Any) -> list[Any]:
    """Always there; it looks at the network when training begins."""
    if not hasattr(data, "batch_size"):  # somebody's own Trainer, with bare loaders
        return []
    from cait.extras.threads.callback import CPUThreads

    return [CPUThreads(data)]
