"""Lightning's strategy for FSDP2: each process keeps a part of all parameters, gradients, moments and averages."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm

from cait import ckpt
from cait.errors import UserError, one_line
from cait.model import network as networks
from cait.model.config import VARIANTS
from contrib.fsdp import sharded

if TYPE_CHECKING:
    from cait.train.module import CaiTModule

ANOTHER = "take another --model.optimizer, such as adamw"
NOT_SHARED = ("mixed torch.Tensor and DTensor", "Sharding propagation failed")
"""What torch says of an operation that it cannot share out."""
PRECISIONS = ("32-true", "bf16-mixed")
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _BatchNorm)
"""Their activations are float32, and not all of them accept parameters of another type."""


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all processes. `CaiTModule.configure_model` calls `shard_module`.

    Checkpoints are files as a run with DDP writes them, see `sharded.py`. So they are restored at the same points of a
    run as DDP's, and either strategy reads the other's checkpoints.
    """

    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True
    # Lightning's own would leave the loading to `load_checkpoint`.
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    load_model_state_dict = Strategy.load_model_state_dict
    optimizer_state = Strategy.optimizer_state
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict

    def __init__(self, **settings: Any) -> None:
        super().__init__(tensor_parallel_size=1, **settings)
        self._states_checked = False

    def check(self, precision: str, sync_batchnorm: bool) -> None:
        """Raise UserError if FSDP2 cannot train with these settings."""
        if precision not in PRECISIONS:
            raise UserError(
                f"--trainer.precision {precision}: fsdp2 takes {' or '.join(PRECISIONS)}"
            )
        if sync_batchnorm:
            raise UserError(
                "--trainer.sync_batchnorm true: fsdp2 leaves batch norms as they are; take ddp"
            )
        if self.root_device.type not in ("cpu", "cuda"):
            raise UserError(
                f"fsdp2 needs GPUs of NVIDIA or AMD, or the CPU, not {self.root_device.type}"
            )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard_module(self, module: CaiTModule) -> None:
        """Shard the network of a module, once. Raises UserError if it cannot be sharded."""
        if isinstance(module.model, FSDPModule):
            return
        half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        shard(module.model, self.device_mesh["data_parallel"], half)
        # another network may use a block's parameters outside of the block
        if module.name not in VARIANTS:
            with (
                torch.device(self.device_mesh.device_type),
                self.precision_plugin.forward_context(),
            ):
                networks.check(
                    module.model,
                    module.name,
                    networks.input_shape(module.hparams),
                    module.num_classes,
                )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Refuse batches in which not all processes take part: every batch needs all of them."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, sized_len(dataloader))
        if len(set(counts)) > 1:
            raise UserError(
                f"fsdp2 needs all processes for every batch, and they have {min(counts)} to {max(counts)} batches: "
                "set another --data.eval_batch_size"
            )
        return dataloader

    def post_backward(self, closure_loss: Tensor) -> None:
        """Give all processes the statistics of process 0's batch norms, as DDP does before the next forward pass."""
        assert self.lightning_module
        for buffer in self.lightning_module.model.buffers():  # type: ignore[union-attr]
            dist.broadcast(buffer, 0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().optimizer_step(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in NOT_SHARED):
                raise
            raise UserError(f"fsdp2 cannot run this step: {one_line(error)}; {ANOTHER}") from error
        if not self._states_checked:  # now, not when the first checkpoint is due
            self._check_states(self.optimizers[0])
        return result

    def _check_states(self, optimizer: Any) -> None:
        """Refuse moments that are not sharded as their parameters are: `load_checkpoint` would share them out."""
        for parameter, state in optimizer.state.items():
            self._states_checked = True
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.ndim == 0:  # as a step count
                    continue
                if (
                    getattr(value, "placements", None) != (Shard(0),)
                    or value.shape != parameter.shape
                ):
                    raise UserError(
                        f"fsdp2 cannot save the optimizer's {name}: it is not shared out as its parameter is; {ANOTHER}"
                    )

    def save_checkpoint(
        self, checkpoint: ckpt.Checkpoint, filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write whole tensors, as with DDP: process 0 has them one by one in its host's memory."""
        Strategy.save_checkpoint(self, sharded.gather(checkpoint), filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> ckpt.Checkpoint:
        """Read a checkpoint. Each process keeps only its own part."""
        assert self.lightning_module
        names = {
            name
            for name, value in self.lightning_module.state_dict().items()
            if isinstance(value, DTensor)
        }
        names |= {name.removeprefix("model.") for name in names}  # those of the moving average
        return sharded.share_out(
            ckpt.read_checkpoint(checkpoint_path), self.device_mesh["data_parallel"], names
        )


def shard(network: Any, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Have each process keep a part of every parameter, of its gradient and of its moments, in place.

    Each child of the network's Sequential and ModuleList children, of CaiT each block, gathers its parameters when it
    runs and frees them afterwards, and so does the network with the others. All processes start from the values of
    process 0. `copy.deepcopy` of the network gives a copy that is sharded in the same way. Raises UserError if the
    network cannot be sharded.

    Args:
        mesh: the processes, in one dimension.
        compute: type in which the blocks' parameters are gathered and their gradients computed, except in norms.
            Parameters are kept, and gradients summed, in float32. None computes in float32 too.
    """
    network.to(memory_format=torch.contiguous_format)  # FSDP2 takes no other
    for tensor in [*network.parameters(), *network.buffers()]:
        on_device = tensor.detach().to(mesh.device_type).contiguous()
        dist.broadcast(on_device, 0)
        tensor.detach().copy_(on_device)
    meta = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        for parameter in network.parameters()
    }
    blank = deepcopy(network, meta)  # a sharded network cannot be deep-copied

    def copy_sharded(_: dict[int, Any]) -> nn.Module:
        copied = deepcopy(blank)
        _shard(copied, mesh, compute)
        copied.load_state_dict(
            {name: value.clone() for name, value in network.state_dict().items()}, assign=True
        )
        return copied

    _shard(network, mesh, compute)
    network.__deepcopy__ = copy_sharded


def _shard(network: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    # Autocast casts what layers read. What is between the blocks stays in float32, as without sharding, because
    # bfloat16 would lose what a small γ adds. So positions and class token, which are in no block, keep float32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    try:
        for stack in network.children():
            if not isinstance(stack, nn.Sequential | nn.ModuleList):
                continue
            for block in stack:
                for layer in block.modules():
                    if compute and isinstance(layer, NORMS):
                        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(network, mesh=mesh, reshard_after_forward=True)
    # whatever another network holds, such as a parameter without a dimension
    except Exception as error:
        raise UserError(f"the network cannot be sharded: {one_line(error)}") from error
