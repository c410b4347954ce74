"""Networks folded for inference: `cait predict`, `cait.load` and exports run fewer operations for the same logits."""

from typing import Any


def fold(network: Any, portable: bool) -> Any:
    """See `contrib.inference.folded.fold`."""
    from contrib.inference.folded import fold

    return fold(network, portable)
