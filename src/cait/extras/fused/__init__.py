"""Faster attention with talking heads: --model.fields.attention_backend recompute, or fused on a GPU."""

ATTENTION_BACKENDS = {"recompute": "cait.extras.fused.recompute:Recompute", "fused": "cait.extras.fused.backend:Fused"}
