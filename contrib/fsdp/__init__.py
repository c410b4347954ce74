"""Train with FSDP2: parameters, gradients and moments shared out over all processes."""

from cait.plugins import Verb

VERBS = {
    "consolidate": Verb(
        "contrib.fsdp.consolidate:consolidate",
        "write a sharded checkpoint as one file: cait consolidate NAME [--checkpoint best|last]",
    )
}
STRATEGIES = {"fsdp2": "contrib.fsdp.strategy:FullyShardedStrategy"}
CHECKPOINT_FOLDERS = "contrib.fsdp.sharded"
