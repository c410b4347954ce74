"""One of several processes that compare Muon on shares with Muon on whole matrices: test_fsdp.py starts them."""

import torch
import torch.distributed as dist
from modules import FIELDS
from timm.optim import muon
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cait.extras.fsdp.strategy import shard
from cait.model.network import create_model
from cait.train.module import whole_tensor
from cait.train.optim import OptimizerSettings

STEPS = 4


def network() -> nn.Module:
    """Three processes cannot share its rows evenly."""
    torch.manual_seed(0)
    return create_model("xxs24", 8, 7, 0.0, **FIELDS | dict(embed_dim=20, depth=1))


def trained(model: nn.Module) -> list[Tensor]:
    """The whole matrices after some steps on the same images in all processes."""
    optimizer = OptimizerSettings(optimizer="muon", weight_decay=0.1).build(model, 0.02)
    for step in range(STEPS):
        images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return matrices(model)


def matrices(model: nn.Module) -> list[Tensor]:
    return [whole_tensor(parameter.detach()) for parameter in model.parameters() if parameter.ndim > 1]


def difference() -> float:
    """The largest, relative to how far a matrix has moved."""
    whole, shares, start = network(), network(), matrices(network())
    shard(shares, init_device_mesh("cpu", (dist.get_world_size(),)))
    sides = zip(trained(shares), trained(whole), start, strict=True)
    return max(float((ours - theirs).norm() / (theirs - before).norm()) for ours, theirs, before in sides)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    # Muon multiplies in bfloat16, whose rounding it scales up: exact products show whether the shares are right.
    rounded = muon.zeropower_via_newtonschulz.__defaults__
    exact = tuple(torch.float32 if value is torch.bfloat16 else value for value in rounded)
    assert exact != rounded
    muon.zeropower_via_newtonschulz.__defaults__ = exact
    largest = difference()
    if dist.get_rank() == 0:
        print(largest)
    dist.destroy_process_group()
