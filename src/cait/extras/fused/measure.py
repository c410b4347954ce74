"""Hold the backends of attention with talking heads against float64, then time them. Needs torch alone."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cait import disk
from cait.model.attention import SelfAttention
from cait.model.config import attention_backends
from cait.model.talking_heads import Backends, Shape

ROUNDS, WARM_UP = 10, 3
IMAGES = 2
"""Images on which a backend is held against float64."""
CACHE = "cait_attention.json"
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A layer of a network as it will train."""

    shape: Shape
    images: int
    """In a batch of this process."""
    compiled: bool = False
    parameters: torch.dtype = torch.float32
    """The precision of W_l and W_w; with autocast it is not that of the shape."""
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)
    """The Trainer's context of a forward pass."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What the times depend on, in the cache."""
        return *versions(self.shape.device), *self.shape, self.images, self.compiled, self.parameters

    @property
    def bound(self) -> float:
        """The largest accepted difference, relative to the norm of a tensor."""
        return max(4 * torch.finfo(self.shape.dtype).eps, 1e-4)


@dataclass
class Measured:
    """Milliseconds of a layer, forward and backward, by backend; and why others are left out."""

    ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    part: str = "layer"
    otherwise: str = "reference"
    """What to take where nothing could be timed."""

    @property
    def fastest(self) -> str:
        return min(self.ms, key=self.ms.__getitem__, default=self.otherwise)

    def __str__(self) -> str:
        """As "fused 0.41 ms a layer, recompute 0.95: fused; without reference: ..."."""
        times = [f"{name} {self.ms[name]:.2g}" for name in sorted(self.ms, key=self.ms.__getitem__)]
        shown = f"{', '.join([f'{times[0]} ms a {self.part}', *times[1:]])}: " if times else ""
        reasons = "".join(f"; without {name}: {reason}" for name, reason in self.left_out.items())
        return f"{shown}{self.fastest}{reasons}"


def shapes(network: Any, device: str, dtype: torch.dtype) -> dict[Shape, Backends]:
    """The shapes of the layers of talking heads whose backend is "auto"."""
    found: dict[Shape, Backends] = {}
    layers = [layer for layer in network.modules() if isinstance(layer, SelfAttention)]
    for layer in layers:
        if layer.talking_heads and not layer.cosine and layer.backend == "auto":
            k = layer.qkv.in_features // layer.num_heads
            found |= {Shape(device, dtype, N, layer.num_heads, k): layer.backends for N in sorted(network.token_counts)}
    return found


def milliseconds(step: Step, device: torch.device) -> float:
    """The median time of a call on the device."""
    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            before = time.perf_counter()
            step()
            torch.accelerator.synchronize() if device.type != "cpu" else None
            found.append(1000 * (time.perf_counter() - before))
    return statistics.median(found)


def measure(case: Case, clock: Callable[[Step, torch.device], float] = milliseconds) -> Measured:
    """Time every backend that runs here and is right. It compiles kernels, which takes some seconds."""
    backends, found = Backends(), Measured()
    for name in attention_backends():
        if name == "auto":
            continue
        if reason := backends.refusal(name, *case.shape):
            found.left_out[name] = f"it needs {reason}"
            continue
        try:
            error = difference(backends, name, case)
            if not error <= case.bound:  # NaN too
                found.left_out[name] = f"it differs by {error:.1e} from float64, {case.bound:.1e} is allowed"
                continue
            found.ms[name] = clock(_step(backends, name, case), torch.device(case.shape.device))
        except Exception as failure:  # no compiler, an old driver, too little memory: train without it
            found.left_out[name] = in_a_line(failure)
    if case.shape.device == "cuda":
        torch.cuda.empty_cache()
    return found


def in_a_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"


def difference(backends: Backends, name: str, case: Case) -> float:
    """Largest error of the output and the gradients against the plain formula in float64; NaN if one is.

    Each error is relative to the norm of its tensor.
    """
    few = replace(case, images=IMAGES)
    errors = [
        (ours - exact).norm() / exact.norm()
        for ours, exact in zip(_results(backends, name, few), _results(backends, None, few), strict=True)
    ]
    return torch.stack(errors).max().item()


def _results(backends: Backends, name: str | None, case: Case) -> Iterator[Tensor]:
    """The output and the gradients of qkv, W_l, W_w and b_w; that of b_l is 0. Without a name exactly, in float64."""
    qkv, proj_l, proj_w, d_out = _tensors(case, exact=name is None)
    with torch.inference_mode(False), torch.enable_grad(), case.context() if name else nullcontext():
        out = backends.attend(qkv, proj_l, proj_w, case.shape.k**-0.5, name or "reference")
    yield out
    yield from torch.autograd.grad(out, [qkv, proj_l.weight, proj_w.weight, proj_w.bias], d_out.to(out.dtype))


def _step(backends: Backends, name: str, case: Case) -> Step:
    """A forward and a backward pass of the layer."""
    qkv, proj_l, proj_w, d_out = _tensors(case)

    def attend() -> Tensor:
        return backends.attend(qkv, proj_l, proj_w, case.shape.k**-0.5, name)

    forward = torch.compile(attend, fullgraph=True) if case.compiled else attend

    def step() -> None:
        with torch.inference_mode(False), torch.enable_grad(), case.context():
            out = forward()
        torch.autograd.grad(out, [qkv, *proj_l.parameters(), *proj_w.parameters()], d_out.to(out.dtype))

    return step


def _tensors(case: Case, exact: bool = False) -> tuple[Tensor, nn.Linear, nn.Linear, Tensor]:
    """qkv, both mixing layers and the gradient of the output: the same numbers each time, `exact` in float64."""
    (device, dtype, N, h, k), B = case.shape, case.images
    generator = torch.Generator(device).manual_seed(0)  # one of its own: the run's draws stay the same

    def draw(kind: torch.dtype, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device).to(kind)
        return (drawn.double() if exact else drawn).requires_grad_()

    with torch.inference_mode(False):
        layers = [nn.utils.skip_init(nn.Linear, h, h, device=device) for _ in range(2)]
        for layer in layers:
            layer.weight, layer.bias = (nn.Parameter(draw(case.parameters, *shape)) for shape in ((h, h), (h,)))
        return draw(dtype, B, N, 3, h, k), *layers, draw(dtype, B, N, h * k).detach()


def remembered(case: Any, make: Callable[[Any], Measured], folder: Path | None = None) -> Measured:
    """What `make` finds for a case, kept by its `key` beside torch.compile's cache."""
    path = (folder or _cache_folder()) / CACHE
    key = " ".join(map(str, case.key))
    if isinstance(entry := _cached(path).get(key), dict) and entry.keys() == vars(Measured()).keys():
        return Measured(**entry)
    found = make(case)
    with suppress(OSError):  # a disk that is full: it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(path) as beside:  # `make` may have kept something too
            beside.write_text(json.dumps(_cached(path) | {key: vars(found)}, indent=1))
    return found


def settle(network: Any, device: str, dtype: torch.dtype, images: int, compiled: bool, **more: Any) -> list[Measured]:
    """Have "auto" take the fastest for batches of so many images: for a block, or a loop of your own.

    Args:
        dtype: the precision of qkv.
        more: further fields of `Case`.
    """
    found = []
    for shape, backends in shapes(network, device, dtype).items():
        found.append(remembered(Case(shape, images, compiled, **more), measure))
        backends.settled[shape] = found[-1].fastest
    return found


def _cached(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _cache_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir())


def versions(device: str) -> tuple[str, ...]:
    """Of the device and of what makes its code."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    triton = ""
    with suppress(ImportError):
        import triton as package

        triton = package.__version__
    return name, torch.__version__, triton
