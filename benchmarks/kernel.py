"""The fused attention with talking heads alone: beside the other backends, tile by tile, and as it compiles.

    python benchmarks/kernel.py [--shapes 8x196 ...] [--batch 64] [--tune] [--out FOLDER]
    python benchmarks/kernel.py --compile [--heads 4 8] [--capability 9 0]

The first form needs a GPU and times forward and backward of a layer for shapes heads × tokens;
`--tune` times the tiles of `TILES` first, kernel by kernel, and prints the rows for
`cait.model.fused.TILINGS`. The second needs none: it compiles the kernels for a GPU and says what
registers and shared memory they take. "sdpa" is attention without talking heads, by PyTorch.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from report import file_name, stamp, write
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cait.errors import UserError
from cait.model import fused, kernels
from cait.model.attention import merge_heads, talking_heads_attention
from cait.model.fused import NARROW, SMALL, TALL, WIDE, Tile, Tiling

SHAPES = ["8x196", "4x196", "8x576", "4x576"]
"""Heads × tokens of S-24 and XXS-24, at 224 and at 384."""
TILES = [WIDE, TALL, SMALL, NARROW, Tile(64, 32, 4, 1), WIDE._replace(stages=2), SMALL._replace(stages=2)]
K = 48
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(
    name: str, tile: Tile, heads: int, k: int = K, dtype: torch.dtype = torch.bfloat16, capability: int = 90
) -> dict[str, int]:
    """Compile a kernel for a GPU that need not be here: registers, bytes of stack (spills) and of shared memory."""
    kernel = getattr(kernels, f"{name}_kernel")
    constants = fused.constants(kernel, tile, heads, k)
    signature, aligned = {}, {}
    for at, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("N", "stride_b", "stride_n", "zero"):
            signature[argument] = "i32"
        else:
            signature[argument] = f"*{NAMES[dtype] if argument in ('qkv', 'd_out', 'out', 'd_qkv') else 'fp32'}"
        if argument not in (*constants, "N"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=tile.warps, num_stages=tile.stages),
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    return dict(registers=registers, stack=stack, shared=made.metadata.shared)


def compile_table(heads: list[int], capability: int) -> list[str]:
    lines = ["| heads | kernel | tile, warps | registers a thread | bytes spilled a thread | shared memory |"]
    lines.append("|---|---|---|---|---|---|")
    for h in heads:
        for name, tile in fused.default(h)._asdict().items():
            found = compiled(name, tile, h, capability=capability)
            size = f"{found['shared'] / 2**10:.0f} KiB"
            block = f"{tile.rows} × {tile.columns}, {tile.warps}"
            lines.append(f"| {h} | {name} | {block} | {found['registers']} | {found['stack']} | {size} |")
            print(lines[-1], flush=True)
    return lines


def milliseconds(call: Callable[[], Any], rounds: int = 20) -> float:
    """Median of `rounds` calls by the GPU's own clock."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Layer:
    """The tensors of one layer's attention: heads × tokens of 48 channels, for a batch of images."""

    def __init__(self, shape: str, batch: int, dtype: torch.dtype) -> None:
        self.heads, self.tokens = (int(number) for number in shape.split("x"))
        generator = torch.Generator("cuda").manual_seed(0)
        place = dict(generator=generator, device="cuda", dtype=dtype)
        self.qkv = torch.randn(batch, self.tokens, 3, self.heads, K, **place).requires_grad_()
        self.d_out = torch.randn(batch, self.tokens, self.heads * K, **place)
        self.proj_l, self.proj_w = (nn.Linear(self.heads, self.heads).cuda() for _ in range(2))

    def attend(self, backend: str) -> Tensor:
        if backend == "sdpa":
            return merge_heads(F.scaled_dot_product_attention(*self.qkv.permute(2, 0, 3, 1, 4).unbind(0)))
        with torch.autocast("cuda", self.qkv.dtype):
            return talking_heads_attention(self.qkv, self.proj_l, self.proj_w, K**-0.5, backend)

    def times(self, backend: str) -> tuple[float, float]:
        """Of a forward pass as in inference, and of a backward pass."""
        with torch.no_grad():
            forward = milliseconds(lambda: self.attend(backend))
        out = self.attend(backend)
        leaves = [self.qkv, *(self.proj_l.weight, self.proj_w.weight, self.proj_w.bias) * (backend != "sdpa")]
        return forward, milliseconds(lambda: torch.autograd.grad(out, leaves, self.d_out, retain_graph=True))


def tune(layer: Layer) -> str:
    """Try the tiles for each kernel in turn, leave the best in `fused.TILINGS` and give its row."""
    qkv = layer.qkv
    key = (torch.cuda.get_device_capability(), qkv.dtype, layer.heads, K, layer.tokens)
    best = fused.tiling(qkv)
    for name in Tiling._fields:
        times = {}
        for tile in TILES:
            fused.TILINGS[key] = best._replace(**{name: tile})
            try:
                times[tile] = layer.times("fused")[name != "forward"]
            except UserError:  # it does not fit
                continue
            print(f"  {name} {tuple(tile)}: {times[tile]:.3f} ms", flush=True)
        best = best._replace(**{name: min(times, key=times.__getitem__)})
    fused.TILINGS[key] = best
    return f"{key}: Tiling({', '.join(f'Tile{tuple(tile)}' for tile in best)}),"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tune", action="store_true", help="time the tiles first")
    parser.add_argument("--compile", action="store_true", help="only compile, for which no GPU is needed")
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 6, 8, 16])
    parser.add_argument("--capability", type=int, nargs=2, default=[9, 0])
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    options = parser.parse_args()
    if options.compile:
        major, minor = options.capability
        compile_table(options.heads, 10 * major + minor)
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here to time on; --compile needs none")
    rows, tilings, lines = [], [], ["| heads × tokens | backend | forward, ms | backward, ms |", "|---|---|---|---|"]
    for shape in options.shapes:
        layer = Layer(shape, options.batch, getattr(torch, options.dtype))
        if options.tune:
            tilings.append(tune(layer))
            print(tilings[-1], flush=True)
        for backend in ("fused", "recompute", "reference", "sdpa"):
            forward, backward = layer.times(backend)
            rows.append(dict(shape=shape, backend=backend, forward_ms=forward, backward_ms=backward))
            lines.append(f"| {shape.replace('x', ' × ')} | {backend} | {forward:.3f} | {backward:.3f} |")
            print(lines[-1], flush=True)
    if options.out:
        content = {"batch": options.batch, "dtype": options.dtype, "rows": rows, "tilings": tilings}
        title = ["# Attention with talking heads, one layer", "", stamp(), ""]
        title += [f"`python benchmarks/kernel.py --batch {options.batch}`, {options.dtype}", ""]
        code = ["", "Tiles:", "", *(f"    {row}" for row in tilings)] if tilings else []
        write(options.out, file_name("kernel"), content, [*title, *lines, *code])


if __name__ == "__main__":
    main()
