"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cait.run.checkpoints import DurableCheckpointIO


class BackgroundCheckpointIO(DurableCheckpointIO):
    """Copy the state between two steps, and let a thread write the copy as `DurableCheckpointIO` does.

    A GPU copies into pinned memory of the host, after the steps that are queued and before the next one; the host
    does not wait for it. Two copies are kept, because the end of an epoch saves `best.ckpt` and `last.ckpt`. A third
    save waits until the older copy is written. A failure is kept in `error`, as in the base class.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start()

    def _start(self) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._copies = [_Copy(), _Copy()]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        copy = self._copies[0]
        self._copies.reverse()
        copy.wait()
        state, copied = copy.take(checkpoint)

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            super(BackgroundCheckpointIO, self).save_checkpoint(state, path, storage_options)

        copy.written = self._writer.submit(write)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.finish()
        return super().load_checkpoint(*arguments, **options)

    def finish(self) -> None:
        for copy in self._copies:
            copy.wait()

    def teardown(self) -> None:
        self.finish()
        self._writer.shutdown()
        self._start()  # the Trainer may fit again; the thread starts with its first file
        super().teardown()


class _Copy:
    """Memory for one copy of the state, used again by later saves."""

    def __init__(self) -> None:
        self.written: Future[None] | None = None
        self._tensors: dict[int, Tensor] = {}

    def wait(self) -> None:
        if self.written is not None:
            self.written.result()

    def take(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], torch.cuda.Event | None]:
        """(the copy, an event after which the GPU has filled it)"""
        memo: dict[int, Any] = {}  # deepcopy uses what it finds here as the copy
        on_gpu = False
        for place, tensor in enumerate(leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)):
            # Only a CUDA event is waited for. Another device, as MPS, must have copied before the next step.
            memo[id(tensor)] = self._room(place, tensor).copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            on_gpu |= tensor.is_cuda
        state = deepcopy(checkpoint, memo)
        if not on_gpu:
            return state, None
        copied = torch.cuda.Event()
        copied.record()
        return state, copied

    def _room(self, place: int, tensor: Tensor) -> Tensor:
        found = self._tensors.get(place)
        if found is None or (found.shape, found.stride(), found.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            found = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._tensors[place] = found
        return found
