"""A network whose parameters are shared out over processes: FSDP2."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cait.errors import UserError, one_line
from cait.model.network import blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _BatchNorm)
"""Their activations are float32, and not all of them accept parameters of another type."""


def shard(network: Any, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Have each process keep a part of every parameter, of its gradient and of its moments, in place.

    The network gets a method `copy_sharded`, which returns a copy that is sharded in the same way.

    Each block of `cait.model.network.blocks` gathers its parameters when it runs and frees them afterwards. The
    network does the same with parameters outside of the blocks. A network without blocks is gathered as a whole. All
    processes start from the values of process 0.

    Args:
        network: an `nn.Module`.
        mesh: the processes, in one dimension.
        compute: type in which the blocks' parameters are gathered and their gradients computed, except in norms.
            Parameters are kept, and gradients summed, in float32. None computes in float32 too.

    Raises:
        UserError: the network cannot be sharded.
    """
    for tensor in [*network.parameters(), *network.buffers()]:
        on_device = tensor.detach().to(mesh.device_type).contiguous()
        torch.distributed.broadcast(on_device, 0)
        tensor.detach().copy_(on_device)
    meta = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in network.parameters()
    }
    blank = deepcopy(network, meta)  # a sharded network cannot be deep-copied
    _shard(network, mesh, compute)
    network.copy_sharded = partial(_copy, network, blank, mesh, compute)


def _shard(network: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Autocast casts what layers read. What is between the blocks stays in float32, as without sharding, because
    # bfloat16 would lose what a small γ adds. So positions and class token, which are in no block, keep float32.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    try:
        for block in blocks(network):
            for norm in (part for part in block.modules() if compute is not None and isinstance(part, NORMS)):
                fully_shard(norm, mesh=mesh, reshard_after_forward=True)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(network, mesh=mesh, reshard_after_forward=True)
    except Exception as error:  # whatever another network holds, such as a parameter without a dimension
        raise UserError(f"the network cannot be sharded: {one_line(error)}") from error
    if hasattr(network, "forward_heads"):
        register_fsdp_forward_method(network, "forward_heads")


def _copy(network: nn.Module, blank: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None) -> nn.Module:
    copied = deepcopy(blank)
    _shard(copied, mesh, compute)
    copied.load_state_dict({name: value.clone() for name, value in network.state_dict().items()}, assign=True)
    return copied
