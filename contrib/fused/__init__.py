"""Attention with talking heads as a Triton kernel: --model.fields.attention_backend fused, on a GPU."""

ATTENTION_BACKENDS = {"fused": "contrib.fused.backend:fused"}
