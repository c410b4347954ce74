"""Attention with talking heads, one layer: times by backend and by kernel, on a GPU.

    python benchmarks/kernel.py [--shapes 8x196 ...] [--batch 256] [--out FOLDER]

Times forward and backward of a layer for shapes heads × tokens, each kernel by itself, and the GPU's own
ceilings of a copy and of a product. "sdpa" is attention without talking heads, by PyTorch.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import triton
from report import DEVICE, file_name, median_ms, stamp, write
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cait.model.attention import backend_named, merge_heads
from contrib.fused import attention, kernels
from contrib.fused.attention import heads_first, padded, scaled_product

SHAPES = ["8x196", "4x196", "8x576", "4x576"]
"""Heads × tokens of S-24 and XXS-24, at 224 and at 384."""
BACKENDS = ["fused", "recompute", "reference", "timm", "timm compiled", "sdpa"]
K = 48


def parse(shape: str) -> tuple[int, int]:
    heads, tokens = (int(number) for number in shape.split("x"))
    return heads, tokens


def compiled(name: str, heads: int, N: int) -> dict[str, Any]:
    """Compile a kernel for bfloat16 maps and an H100, which need not be here.

    Gives registers and bytes of stack (spills) a thread, and bytes of shared memory a program.
    """
    kernel = getattr(kernels, f"{name}_kernel")
    tile = getattr(attention.default(N, torch.bfloat16), name)
    constants = attention.constants(kernel, tile, heads, padded(N))
    signature, aligned = {}, {}
    for at, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("queries", "N", "ld", "turns"):
            signature[argument] = "i32"
        else:
            signature[argument] = f"*{'bf16' if argument in ('maps', 'd_maps') else 'fp32'}"
        if argument not in (*constants, "queries", "N", "turns"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=attention.options(tile))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (
        int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    )
    return dict(registers=registers, stack=stack, shared=made.metadata.shared)


class Held(nn.Module):
    """In place of timm's linear layer: the qkv that are there."""

    def __init__(self, qkv: Tensor) -> None:
        super().__init__()
        self.held = qkv

    def forward(self, x: Tensor) -> Tensor:
        return self.held.flatten(2)


class Layer:
    """The tensors of one layer's attention: heads × tokens of 48 channels, for a batch of images."""

    def __init__(self, shape: str, batch: int, dtype: torch.dtype) -> None:
        self.heads, self.tokens = parse(shape)
        self.batch, self.dtype = batch, dtype
        torch.manual_seed(0)
        place = dict(device=DEVICE, dtype=dtype)
        self.qkv = torch.randn(batch, self.tokens, 3, self.heads, K, **place).requires_grad_()
        self.d_out = torch.randn(batch, self.tokens, self.heads * K, **place)
        self.proj_l, self.proj_w = (
            nn.Linear(self.heads, self.heads, device=DEVICE) for _ in range(2)
        )
        self.timm = timm.models.cait.TalkingHeadAttn(self.heads * K, self.heads).to(DEVICE)
        # the attention alone, as ours
        self.timm.qkv, self.timm.proj = (
            Held(self.qkv),
            nn.Identity(),
        )
        self.compiled = torch.compile(self.timm, dynamic=False)

    def attend(self, backend: str) -> Tensor:
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype != torch.float32):
            if backend == "sdpa":
                return merge_heads(
                    F.scaled_dot_product_attention(*self.qkv.permute(2, 0, 3, 1, 4).unbind(0))
                )
            if backend.startswith("timm"):
                # for its shape
                return (self.compiled if "compiled" in backend else self.timm)(self.d_out)
            mixers = self.proj_l.weight, self.proj_l.bias, self.proj_w.weight, self.proj_w.bias
            return backend_named(backend)(self.qkv, *mixers, K**-0.5)

    def times(self, backend: str, rounds: int) -> dict[str, float]:
        """ms of a forward pass as in inference, of a backward pass, and MiB at the peak of both."""
        with torch.no_grad():
            forward = median_ms(lambda: self.attend(backend), rounds)
        leaves = [
            self.qkv,
            *(self.proj_l.weight, self.proj_w.weight) * (backend in ("fused", "recompute")),
        ]
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        out = self.attend(backend)
        backward = median_ms(
            lambda: torch.autograd.grad(out, leaves, self.d_out, retain_graph=True), rounds
        )
        peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else float("nan")
        return dict(forward_ms=forward, backward_ms=backward, peak_mib=peak)

    def maps(self) -> tuple[Tensor, Tensor]:
        q, k, _ = heads_first(self.qkv.detach(), padded(self.tokens))
        maps = scaled_product(q[:, : self.tokens], k.transpose(1, 2), K**-0.5)
        return maps, maps.clone()

    def kernel_times(self, rounds: int) -> dict[str, float]:
        """ms of each kernel and product by itself. Kernels run in place, on what they left before."""
        maps, d_maps = self.maps()
        weights = self.proj_l.weight.detach(), self.proj_w.weight.detach()
        heads = heads_first(self.qkv.detach(), padded(self.tokens))
        q, k, v = heads[0, :, : self.tokens], heads[1].transpose(1, 2), heads[2]
        calls = {
            "forward kernel": lambda: attention.mix(maps, *weights),
            "backward kernel": lambda: attention.mix_backward(maps, d_maps, *weights),
            "S = Q Kᵀ": lambda: scaled_product(q, k, K**-0.5),
            "O = A V": lambda: maps @ v,
            "dV = Aᵀ dO": lambda: maps.transpose(1, 2) @ q,
            "qkv by heads": lambda: heads_first(self.qkv.detach(), padded(self.tokens)),
        }
        return {name: median_ms(call, rounds) for name, call in calls.items()}


def ceilings(rounds: int) -> list[str]:
    """What this GPU gives at most: a copy in GB/s, products of bfloat16 in TFLOP/s."""
    size = 2**13 if DEVICE == "cuda" else 2**8
    source = torch.randn(4 * size, 4 * size, device=DEVICE, dtype=torch.bfloat16)
    target, square = torch.empty_like(source), source[:size, :size].contiguous()
    copy = median_ms(lambda: target.copy_(source), rounds)
    product = median_ms(lambda: square @ square, rounds)
    gigabytes, tflops = 4e-6 * source.numel() / copy, 2e-9 * size**3 / product
    return [f"Ceilings in this run: copy {gigabytes:.0f} GB/s, product {tflops:.0f} TFLOP/s."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    parser.add_argument("--tag", help="a word for the files' names")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    rows, lines = (
        [],
        [
            "| heads × tokens | backend | forward, ms | backward, ms | peak, MiB |",
            "|---|---|---|---|---|",
        ],
    )
    parts = ["", "| heads × tokens | part | ms |", "|---|---|---|"]
    ceiling = ceilings(options.rounds)
    print(*ceiling, sep="\n", flush=True)
    for shape in options.shapes:
        layer = Layer(shape, options.batch, dtype)
        name = shape.replace("x", " × ")
        for backend in options.backends:
            try:
                found = layer.times(backend, options.rounds)
            except torch.OutOfMemoryError:
                print(f"{name} {backend}: out of memory", flush=True)
                continue
            rows.append(dict(shape=shape, backend=backend, **found))
            figures = (
                f"{found['forward_ms']:.3f} | {found['backward_ms']:.3f} | {found['peak_mib']:.0f}"
            )
            lines.append(f"| {name} | {backend} | {figures} |")
            print(lines[-1], flush=True)
        for part, ms in layer.kernel_times(options.rounds).items():
            rows.append(dict(shape=shape, part=part, ms=ms))
            parts.append(f"| {name} | {part} | {ms:.3f} |")
            print(parts[-1], flush=True)
    if options.out:
        title = ["# Attention with talking heads, one layer", "", stamp(), "", *ceiling, ""]
        title += [
            f"`python benchmarks/kernel.py --batch {options.batch}`, {options.dtype}, medians.",
            "",
        ]
        content = {
            "batch": options.batch,
            "dtype": options.dtype,
            "ceilings": ceiling,
            "rows": rows,
        }
        write(options.out, file_name("kernel", options.tag), content, [*title, *lines, *parts])


if __name__ == "__main__":
    main()
