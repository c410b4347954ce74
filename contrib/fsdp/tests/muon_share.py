"""One of several processes that compare Muon on shares with Muon on whole tensors: test_fsdp.py starts them.

It prints by how much the shares differ from what one process makes.
"""

from functools import partial

import timm.optim.muon
import torch
import torch.distributed as dist
from modules import FIELDS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from cait import create_model
from cait.train.module import whole_tensor
from cait.train.optim import OptimizerSettings
from contrib.fsdp.strategy import shard

STEPS = 4
MUON = timm.optim.muon
MUON.zeropower_via_newtonschulz = partial(MUON.zeropower_via_newtonschulz, dtype=torch.float32)
"""In bfloat16, timm's choice, rounding would hide a difference."""


def network() -> nn.Module:
    """Three processes cannot share its rows evenly."""
    torch.manual_seed(0)
    return create_model("xxs24", 8, 7, 0.0, **FIELDS | dict(embed_dim=20, depth=1))


def optimizer_of(model: nn.Module) -> Optimizer:
    """timm's Muon, which leaves biases, norms and scales to its AdamW."""
    return OptimizerSettings(optimizer="muon", weight_decay=0.1).build(model, 0.02)


def train(model: nn.Module, optimizer: Optimizer) -> None:
    """All processes see the same images."""
    for step in range(STEPS):
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(model: nn.Module) -> list[Tensor]:
    """Whole; without the keys' biases, whose gradients are nothing but rounding."""
    named = model.named_parameters()
    return [whole_tensor(parameter.detach()) for name, parameter in named if not name.endswith("attn.k.bias")]


def difference() -> float:
    """The largest of a tensor, relative to how far the tensor has moved."""
    whole, shares = network(), network()
    start = [tensor.clone() for tensor in tensors(whole)]
    shard(shares, init_device_mesh("cpu", (dist.get_world_size(),)))
    for model in (shares, whole):
        train(model, optimizer_of(model))
    sides = zip(tensors(shares), tensors(whole), start, strict=True)
    return max(float((ours - theirs).norm() / (theirs - before).norm()) for ours, theirs, before in sides)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    largest = difference()
    if dist.get_rank() == 0:
        print(largest)
    dist.destroy_process_group()
