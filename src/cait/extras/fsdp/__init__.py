"""Train with FSDP2: parameters, gradients and moments shared out over all processes."""

from cait.plugins import Verb

VERBS = {
    "consolidate": Verb(
        "cait.extras.fsdp.consolidate:consolidate",
        "write a sharded checkpoint as one file: cait consolidate NAME [--checkpoint best|last]",
    )
}
STRATEGIES = {"fsdp2": "cait.extras.fsdp.strategy:FullyShardedStrategy"}
CHECKPOINT_FOLDERS = "cait.extras.fsdp.sharded"
