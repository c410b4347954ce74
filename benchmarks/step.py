"""A training step of ours beside one of timm's CaiT or ViT: time and peak memory, in one run, interleaved.

    python benchmarks/step.py [--cases s24-224 s36-224-dp.2 s24-224-compiled ...] [--batch 8] [--out FOLDER]
    python benchmarks/step.py --against vit [--backend fused recompute]

A case is model-resolution, followed by `-dp.2` for stochastic depth at that rate in both, `-fp32`
(otherwise bf16 autocast) and `-compiled` (torch.compile over the blocks of both). Both models have
the same batch and torch's AdamW over the same parameter groups, and timm's CaiT has our weights; our
AdamW is fused, as the template has it, timm's is torch's default. In each round they take turns;
reported are medians and the median of the rounds' ratios. Peak memory is taken in a process of its
own for each.

Against timm's ViT-S/16, which attends by PyTorch's fused kernels, the last column is the
talking-heads tax: how much longer ours takes for the same multiply-adds, forward and for a step.
"""

import argparse
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import timm
import torch
import torch.nn.functional as F
from report import DEVICE, file_name, in_turns, stamp, write
from report import device as device_name
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cait
from cait.model.config import VARIANTS
from cait.train.optim import param_groups

if hasattr(ctypes.CDLL(None), "mallopt"):
    # glibc gives freed memory back to the system and faults it in again, which for either side may take as
    # long as the computing. M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: it keeps what it has.
    for parameter in (-1, -3):
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)

CASES = ["s24-224", "xxs24-224", "xxs24-384", "s36-224-dp.2", "s24-224-fp32", "s24-224-compiled"]
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "RTX 4090": 165}
"""Dense bf16 products a second, by the makers' data sheets."""
VIT = "vit_small_patch16_224"


class Case:
    """A case by its name, as "s36-224-dp.2-compiled"."""

    def __init__(self, name: str, backend: str = "recompute") -> None:
        self.name, self.backend = name, backend
        self.model, size, *rest = name.split("-")
        self.img_size = int(size)
        self.drop_path_rate, self.dtype, self.compiled = 0.0, torch.bfloat16, False
        for word in rest:
            if word == "compiled":
                self.compiled = True
            elif word == "fp32":
                self.dtype = torch.float32
            else:
                self.drop_path_rate = float(word.removeprefix("dp"))

    def build(self, which: str) -> nn.Module:
        """Our model or timm's CaiT, with the same weights and LayerScale at 1 so that every branch counts, or a ViT."""
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(img_size=self.img_size, drop_path_rate=self.drop_path_rate)
        if which == "vit":
            vit = timm.create_model(VIT, **sizes)
            vit.blocks_token_only = nn.ModuleList()  # as CaiT has, for `stepper`
            return vit.to(DEVICE)
        ours = cait.create_model(self.model, attention_backend=self.backend, **sizes)
        for block in [*ours.blocks, *ours.blocks_token_only]:
            nn.init.ones_(block.gamma_1)
            nn.init.ones_(block.gamma_2)
        if which == "ours":
            return ours.to(DEVICE)
        row = {key: VARIANTS[self.model][key] for key in ("embed_dim", "depth", "num_heads")}
        theirs = timm.create_model("cait_xxs24_224", init_values=1.0, **sizes, **row)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        return theirs.to(DEVICE)


def optimizer_of(model: nn.Module, which: str) -> torch.optim.Optimizer:
    if which == "ours":
        return torch.optim.AdamW(param_groups(model, 0.05), lr=1e-4, fused=True)
    return torch.optim.AdamW(
        param_groups_weight_decay(model, 0.05, no_weight_decay_list=()), lr=1e-4
    )


def stepper(case: Case, which: str, batch: int) -> dict[str, Callable[[], Any]]:
    """Calls for a forward pass in evaluation and for a whole training step."""
    model = case.build(which)

    def autocast() -> Any:
        return torch.autocast(DEVICE, dtype=case.dtype, enabled=case.dtype != torch.float32)

    if case.compiled and which == "ours":
        model.compile_blocks()
    elif case.compiled:
        for block in [*model.blocks, *model.blocks_token_only]:
            block.compile()
    optimizer = optimizer_of(model, which)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, case.img_size, case.img_size, generator=generator).to(DEVICE)
    targets = torch.rand(batch, 1000, generator=generator).softmax(dim=1).to(DEVICE)

    def forward() -> Tensor:
        model.eval()
        with torch.no_grad(), autocast():
            return model(images)

    def step() -> Tensor:
        model.train()
        with autocast():
            loss = F.cross_entropy(model(images).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return {"forward": forward, "step": step}


def milliseconds(call: Callable[[], Any]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def resident(what: str) -> float:
    """MiB of this process's memory now (VmRSS) or at its highest (VmHWM); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(what))


def peak_memory(case: Case, which: str, batch: int, out: Any) -> None:
    """Put the MiB that training steps need, weights and optimizer included."""
    before = resident("VmRSS")
    step = stepper(case, which, batch)["step"]
    for _ in range(2):  # the second has the optimizer's moments
        step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        # lowers the high-water mark to what there is now
        Path("/proc/self/clear_refs").write_text("5")
    step()
    out.put(
        torch.cuda.max_memory_allocated() / 2**20
        if DEVICE == "cuda"
        else resident("VmHWM") - before
    )


def in_a_process(*arguments: Any) -> float:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=peak_memory, args=(*arguments, out))
    process.start()
    value = out.get()
    process.join()
    return value


def flops(model: str, img_size: int) -> float:
    """Of a forward pass for an image."""
    build = timm.create_model if model == VIT else cait.create_model
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build(model, img_size=img_size).eval()(torch.empty(1, 3, img_size, img_size))
    return counter.get_total_flops()


def measure(case: Case, against: str, batch: int, rounds: int) -> dict[str, Any]:
    sides = {which: stepper(case, which, batch) for which in (against, "ours")}
    found: dict[str, Any] = {
        "case": case.name,
        "backend": case.backend,
        "batch": batch,
        "against": against,
    }
    forward_flops = flops(case.model, case.img_size)
    for what in ("forward", "step"):
        calls = {"theirs": sides[against][what], "ours": sides["ours"][what]}
        theirs, ours = in_turns(calls, rounds, milliseconds, warm=3).values()
        found |= {
            f"{what}_theirs_ms": statistics.median(theirs),
            f"{what}_ours_ms": statistics.median(ours),
        }
        found[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
        if against == "vit":
            found["flop_ratio"] = forward_flops / flops(VIT, case.img_size)
            found[f"{what}_tax"] = 1 / found[f"{what}_ratio"] / found["flop_ratio"]
    del sides
    peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name()), None)
    if peak and case.dtype == torch.bfloat16:
        # a backward pass has twice the work of a forward pass; what is recomputed does not count
        found["mfu_ours"] = (
            3 * batch * forward_flops / (found["step_ours_ms"] / 1e3) / (peak * 1e12)
        )
    memory = [in_a_process(case, which, batch) for which in (against, "ours")]
    found["memory_theirs_mib"], found["memory_ours_mib"] = memory
    found["memory_ratio"] = memory[1] / memory[0]
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | backend | batch | forward: timm's, ours, ratio | step | peak memory | MFU | tax |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        times = (
            f"{r[f'{what}_theirs_ms']:.0f} ms, {r[f'{what}_ours_ms']:.0f} ms, **{r[f'{what}_ratio']:.2f}×**"
            for what in ("forward", "step")
        )
        memory = f"{r['memory_theirs_mib']:.0f} MiB, {r['memory_ours_mib']:.0f} MiB, {r['memory_ratio']:.2f}×"
        mfu = f"{r['mfu_ours']:.1%}" if "mfu_ours" in r else ""
        tax = f"{r['forward_tax']:.2f}, {r['step_tax']:.2f}" if "step_tax" in r else ""
        cells = [r["case"], r["backend"], str(r["batch"]), *times, memory, mfu, tax]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    parser.add_argument("--tag", help="a word for the files' names")
    parser.add_argument(
        "--against", default="timm", choices=["timm", "vit"], help="timm's CaiT or ViT-S/16"
    )
    parser.add_argument("--backend", nargs="+", default=["recompute"], help="of our attention")
    options = parser.parse_args()
    rows = []
    for case in (Case(name, backend) for name in options.cases for backend in options.backend):
        rows.append(measure(case, options.against, options.batch, options.rounds))
        print(*table(rows)[-1:], sep="\n", flush=True)
    if options.out:
        rival = "a ViT" if options.against == "vit" else "CaiT"
        command = (
            f"`python benchmarks/step.py --against {options.against}`, timm {timm.__version__}"
        )
        title = [f"# A training step, ours beside {rival} of timm's", "", stamp(), "", command, ""]
        name = file_name("tax" if options.against == "vit" else "step", options.tag)
        write(options.out, name, {"rows": rows}, [*title, *table(rows)])


if __name__ == "__main__":
    main()
