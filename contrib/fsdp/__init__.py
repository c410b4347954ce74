"""Train with FSDP2: parameters, gradients and moments shared out over all processes."""

STRATEGIES = {"fsdp2": "contrib.fsdp.strategy:FullyShardedStrategy"}
CHECKPOINT_FOLDERS = "contrib.fsdp.sharded"
