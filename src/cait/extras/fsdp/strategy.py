"""`--trainer.strategy fsdp2`: each process keeps a part of all parameters, gradients, moments and averages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cait import ckpt, disk
from cait.errors import UserError, one_line
from cait.extras.fsdp import sharded, sharding
from cait.model import network
from cait.model.config import VARIANTS
from cait.run.checkpoints import DurableCheckpointIO

if TYPE_CHECKING:
    from cait.train.module import CaiTModule

ANOTHER = "take another --model.optimizer, such as adamw"
PRECISIONS = ("32-true", "bf16-mixed")


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all processes. `CaiTModule.configure_model` calls `shard_module`.

    Checkpoints hold what a run with DDP saves, key by key, with sharded tensors: see `sharded.py`. So they are
    restored at the same points of a run as DDP's, and either strategy reads the other's checkpoints.
    """

    restore_checkpoint_after_setup, lightning_restore_optimizer = False, True
    # Lightning's own would gather whole tensors, or leave the loading to `load_checkpoint`.
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict

    def __init__(self, **settings: Any) -> None:
        super().__init__(tensor_parallel_size=1, **settings)

    def check(self, precision: str, sync_batchnorm: bool, optimizer: str) -> None:
        """Raise UserError if FSDP2 cannot train with these settings."""
        if precision not in PRECISIONS:
            raise UserError(f"--trainer.precision {precision}: fsdp2 takes {' or '.join(PRECISIONS)}")
        if sync_batchnorm:
            raise UserError("--trainer.sync_batchnorm true: fsdp2 leaves batch norms as they are; take ddp")
        if "muon" in optimizer:
            raise UserError(f"--model.optimizer {optimizer} needs whole matrices, and fsdp2 shares them out; take ddp")
        if type(self.checkpoint_io) not in (DurableCheckpointIO, TorchCheckpointIO):
            raise UserError("fsdp2 writes checkpoints itself: leave out --save_async true and plugins that write them")
        if self.root_device.type not in ("cpu", "cuda"):
            raise UserError(f"fsdp2 needs GPUs of NVIDIA or AMD, or the CPU, not {self.root_device.type}")

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard_module(self, module: CaiTModule) -> None:
        """Shard the network of a module, once.

        Raises:
            UserError: the network cannot be sharded.
        """
        if hasattr(module.model, "copy_sharded"):
            return
        half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        sharding.shard(module.model, self.device_mesh["data_parallel"], half)
        if module.name not in VARIANTS:  # another network may use a block's parameters outside of the block
            with torch.device(self.device_mesh.device_type), self.precision_plugin.forward_context():
                network.check(module.model, module.name, network.input_shape(module.hparams), module.num_classes)

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
        assert self.lightning_module is not None
        for buffer in self.lightning_module.model.buffers():  # type: ignore[union-attr]
            dist.broadcast(buffer, 0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UserError(f"fsdp2 cannot run this step: {one_line(error)}; {ANOTHER}") from error

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        found = Strategy.optimizer_state(self, optimizer)
        for state in found["state"].values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and getattr(value, "placements", None) != (Shard(0),):
                    raise UserError(
                        f"fsdp2 cannot save the optimizer's {name}: it is not shared out as its parameter is; {ANOTHER}"
                    )
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """`storage_options` may be {"previous": folder}: the checkpoint that was at `filepath` is kept there."""
        path = Path(filepath)
        beside = self.broadcast(disk.scratch(path))
        publish = partial(disk.replace, beside, path, (storage_options or {}).get("previous"))
        error = sharded.save(checkpoint, beside, publish)
        if error:
            self.checkpoint_io.error = f"cannot write {path}: {error}"  # type: ignore[attr-defined]
            if self.is_global_zero:
                disk.remove(beside)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, sharded or plain. Each process keeps only its own part."""
        mesh, path = self.device_mesh["data_parallel"], Path(checkpoint_path)
        if not path.is_dir():
            return sharded.share_out(ckpt.read_checkpoint(path), mesh, self._is_sharded)
        try:
            return sharded.read(path, mesh)
        except Exception as error:
            raise UserError(f"{path} is not a whole checkpoint of a run") from error

    def _is_sharded(self, place: sharded.Place, tensor: Tensor) -> bool:
        assert self.lightning_module is not None
        match place:
            case ("state_dict", str(name)):
                return isinstance(self.lightning_module.state_dict().get(name), DTensor)
            case ("callbacks", ckpt.EMA, str(name)):
                return isinstance(self.lightning_module.state_dict().get(f"model.{name}"), DTensor)
            case ("optimizer_states", *_):
                return tensor.ndim > 0  # not the number of steps
        return False
