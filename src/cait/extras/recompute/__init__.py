"""The backward pass of CaiT by default: hand-written, so it keeps less of the forward pass."""

RECOMPUTE = "cait.extras.recompute.backward:recompute"
ATTENTION_BACKENDS = {"recompute": RECOMPUTE, "default": RECOMPUTE}
