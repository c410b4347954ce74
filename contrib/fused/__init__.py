"""Attention with talking heads as a Triton kernel, on a GPU: --trainer.callbacks+=contrib.fused.callback.Fused"""
