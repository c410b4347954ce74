"""A CUDA device that computes nothing, to see where the host would wait for it.

Tensors on it are torch's FakeTensors: shapes, types and devices are right, and an operation on two devices fails
as on a GPU. Tensors on the CPU are real. Each operation passes a spy that notes those for which CUDA stops the host:
reading a number, a copy to the host, a copy from memory that is not pinned. An operation whose output's size the device
alone knows, as nonzero's, raises by itself.
"""

import traceback
from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


class Spy(TorchDispatchMode):
    """Lists in `waits` where the host would have waited, as the lines of this project or of Lightning."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.operations = set()
        # by address, and kept so that no other tensor comes to lie there
        self._pinned = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        leaves = tree_leaves((args, kwargs))
        on_device = [isinstance(leaf, FakeTensor) for leaf in leaves]
        to_device = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if packet in (aten.pin_memory, aten._pin_memory):
            return self.pin(args[0].clone())
        if not any(on_device) and not to_device:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        # autograd's C++ asks for one like another
        if any(on_device) and kwargs.get("device") == torch.device("meta"):
            kwargs = kwargs | {"device": torch.device("cuda", 0)}
        self.operations.add(str(packet).removeprefix("aten."))
        if packet in (aten._local_scalar_dense, aten.is_nonzero):
            self._note(func)
            return False if packet is aten.is_nonzero or args[0].dtype == torch.bool else 1
        if packet is aten._to_copy:
            source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
            if isinstance(source, FakeTensor) and target.type == "cpu":
                self._note(func)
                with unset_fake_temporarily():
                    return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not isinstance(source, FakeTensor):
                self._note_unless_pinned(func, source, kwargs.get("non_blocking"))
        if packet is aten.copy_:
            into, source, *rest = args
            if isinstance(into, FakeTensor) and not isinstance(source, FakeTensor):
                self._note_unless_pinned(
                    func, source, kwargs.get("non_blocking") or (rest and rest[0])
                )
            elif isinstance(source, FakeTensor) and not isinstance(into, FakeTensor):
                self._note(func)
                return into
        return func(*args, **kwargs)

    def pin(self, tensor):
        """Take the memory of a tensor on the CPU for pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _note_unless_pinned(self, func, source, non_blocking):
        if not non_blocking or source.untyped_storage().data_ptr() not in self._pinned:
            self._note(func)

    def _note(self, func):
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/cait/" in frame.filename or "/lightning/" in frame.filename
        ]
        self.waits.append(f"{func} in {frames[-4:]}")


class FakeCUDAStrategy(SingleDeviceStrategy):
    """One fake device; batches come pinned, as the loaders of a machine with a GPU pin them."""

    def __init__(self, spy):
        super().__init__(device=torch.device("cuda", 0))
        self.spy = spy

    def batch_to_device(self, batch, *args, **kwargs):
        return super().batch_to_device(tree_map_only(Tensor, self.spy.pin, batch), *args, **kwargs)

    def teardown(self):
        pass  # a FakeTensor cannot come back


class FakeCUDAAccelerator(CPUAccelerator):
    def setup_device(self, device):
        pass


def _by_device_and_type(lists, with_indices=False):
    """torch's function of this kind is in C++, for which a FakeTensor's device is another."""
    groups = defaultdict(lambda: ([[] for _ in lists], []))
    for index, first in enumerate(lists[0]):
        group, indices = groups[first.device, first.dtype]
        indices.append(index)
        for part, tensors in zip(group, lists, strict=True):
            part += tensors[index : index + 1]  # a list may be empty
    return dict(groups)


def _swap_tensors(ours, theirs):
    """torch's own refuses FakeTensors, which `Module.to` swaps even where nothing changes."""
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype)


@contextmanager
def fake_cuda():
    """Within it "cuda" is a device that computes nothing."""
    make, generator = Tensor._make_subclass, torch.Generator

    def make_subclass(cls, data, requires_grad=False, **kwargs):
        # Autograd has no threads for a device that is not there: it sees the meta tensor, Python the CUDA device.
        kwargs.pop("dispatch_device", None)
        return make(cls, data, requires_grad, **kwargs)

    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.object(Tensor, "_make_subclass", staticmethod(make_subclass)),
            patch.object(torch, "Generator", lambda device="cpu": generator()),
            patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
            patch("torch.cuda.is_bf16_supported", lambda including_emulation=True: True),
            patch("torch.utils.swap_tensors", _swap_tensors),
            patch("torch.optim.optimizer._group_tensors_by_device_and_dtype", _by_device_and_type),
            patch(
                "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", _by_device_and_type
            ),
            FakeTensorMode(allow_non_fake_inputs=True),
            Spy() as spy,
        ):
            yield spy
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
