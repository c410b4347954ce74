"""A small CaiT and one training step of it."""

import shutil

import pytest
import torch
from torch import Tensor

from cait import create_model
from cait.model.cait import CaiT

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")


def network(mode: str = "skip", drop_path_rate: float = 0.3) -> CaiT:
    torch.manual_seed(0)
    return create_model(
        "xxs24", 32, 10, drop_path_rate, patch_size=8, embed_dim=32, depth=4, layer_scale_init=0.5, drop_path_mode=mode
    )


def step(model: CaiT, images: Tensor, seed: int) -> list[Tensor]:
    """Logits and gradients of one training step."""
    torch.manual_seed(seed)
    logits = model.train()(images)
    model.zero_grad()
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]
