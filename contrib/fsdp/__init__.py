"""Train with FSDP2: parameters, gradients and moments shared out over all processes."""
