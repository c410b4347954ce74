"""Networks folded for inference: fewer operations for the same logits, by `contrib.inference.folded.fold`."""
