"""Checkpoints of sharded tensors are those of DDP: gathered when they are written, shared out when they are read."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import MappingKey, tree_map_only, tree_map_with_path

from cait.ckpt import Checkpoint


def gather(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with whole tensors, on process 0 alone. All processes call it together."""

    def whole(tensor: DTensor) -> Tensor | None:
        gathered = tensor.full_tensor()
        return gathered.cpu() if dist.get_rank() == 0 else None

    return tree_map_only(DTensor, whole, checkpoint)


def share_out(checkpoint: Checkpoint, mesh: DeviceMesh, names: set[str]) -> Checkpoint:
    """A checkpoint in which each process keeps only its part of the parameters `names` and of their moments."""

    def distributed(path: Any, value: Any) -> Any:
        keys = [step.key if isinstance(step, MappingKey) else step.idx for step in path]
        if not isinstance(value, Tensor) or value.ndim == 0:  # as a step count
            return value
        if keys[0] != "optimizer_states" and not (
            keys[0] in ("state_dict", "callbacks") and keys[-1] in names
        ):
            return value
        # all have it: nothing is sent
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None).clone()

    return tree_map_with_path(distributed, checkpoint)
