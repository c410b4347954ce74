"""A small CaiT and one training step of it; a network whose classifier is a convolution."""

import shutil

import pytest
import torch
from torch import nn

from cait import create_model, plugins
from cait.model.config import VARIANTS

needs_cait = pytest.mark.skipif(not VARIANTS, reason="CaiT has been deleted")
needs_ablations = pytest.mark.skipif(
    "paper" not in plugins.extras(), reason="the extra has the paper's ablations"
)
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")

DIGITS = dict(img_size=16, num_classes=10, embed_dim=96, depth=6, num_heads=2, patch_size=4)
TINY = dict(img_size=8, num_classes=7, embed_dim=16, depth=1, num_heads=2, patch_size=4)


def network(mode="skip", drop_path_rate=0.3):
    torch.manual_seed(0)
    return create_model(
        "xxs24",
        32,
        10,
        drop_path_rate,
        patch_size=8,
        embed_dim=32,
        depth=4,
        layer_scale_init=0.5,
        drop_path_mode=mode,
    )


def step(model, images, seed):
    """Logits and gradients of one training step."""
    torch.manual_seed(seed)
    logits = model.train()(images)
    model.zero_grad()
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def saved_bytes(forward, least=0):
    """Bytes that a forward pass keeps for the backward pass, of tensors in a memory of at least so many."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size in sizes.values() if size >= least)


def random_network(name="xxs24", **fields):
    """In training, as a run's network is, with weights of `fill`."""
    with torch.device("meta"):
        model = create_model(name, **fields).train()
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(1)
    fill(model)
    return model


@torch.no_grad()
def fill(model, seed=0):
    """Draw weights of an ordinary size: every block's share in the logits is well above rounding."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "gamma" in name or ("norm" in name and "weight" in name):
            parameter.uniform_(0.5, 1.0)
        else:
            parameter.uniform_(-0.1, 0.1)


class ConvHead(nn.Module):
    def __init__(self, img_size, num_classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, num_classes, 1)

    def get_classifier(self):
        return self.head

    def forward(self, images):
        return self.head(self.body(images)).mean((2, 3))
