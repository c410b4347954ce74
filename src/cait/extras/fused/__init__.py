"""Faster attention with talking heads: --model.fields.attention_backend recompute, or fused on a GPU."""

from typing import Any

ATTENTION_BACKENDS = {"recompute": "cait.extras.fused.recompute:Recompute", "fused": "cait.extras.fused.backend:Fused"}


def step_callbacks(data: Any) -> list[Any]:
    """What "auto" takes for attention and for torch.compile, measured before the first step."""
    from cait.extras.fused.choice import AttentionChoice, CompileChoice

    return [CompileChoice(data), AttentionChoice(data)]  # attention is measured as it will run, compiled or not
