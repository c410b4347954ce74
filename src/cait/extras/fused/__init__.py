"""Attention with talking heads by a Triton kernel, for a GPU: --model.fields.attention_backend fused."""

ATTENTION_BACKENDS = {"fused": "cait.extras.fused.backend:Fused"}
