"""Attention with talking heads as a Triton kernel."""
