"""A training step of ours beside one of timm's CaiT: time and peak memory, in one run, interleaved.

    python benchmarks/step.py [--cases s24-224 xxs24-224 ...] [--batch 8] [--rounds 7] [--compile] [--out FOLDER]

A case is model-resolution, with `-dp.2` for stochastic depth at that rate in both. Both models have
the same weights, the same batch and torch's AdamW over the same parameter groups; ours is fused, as
the template has it, timm's is torch's default. In each round they take turns; reported are medians
and the median of the rounds' ratios. Peak memory is taken in a process of its own for each.
"""

from __future__ import annotations

import argparse
import json
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
from report import device as device_name
from report import stamp
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import cait
from cait.model.config import VARIANTS
from cait.optim import param_groups

CASES = ["s24-224", "xxs24-224", "xxs24-384", "s36-224-dp.2"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case:
    """A case by its name, as "s36-224-dp.2"."""

    def __init__(self, name: str) -> None:
        self.name = name
        model, size, *rest = name.split("-")
        self.model, self.img_size = model, int(size)
        self.drop_path_rate = float(rest[0].removeprefix("dp")) if rest else 0.0

    def build(self, which: str) -> nn.Module:
        """Our model or timm's, with the same weights; LayerScale at 1 so that every branch counts."""
        torch.manual_seed(0)
        ours = cait.create_model(self.model, self.img_size, drop_path_rate=self.drop_path_rate)
        for block in [*ours.blocks, *ours.blocks_token_only]:
            nn.init.ones_(block.gamma_1)
            nn.init.ones_(block.gamma_2)
        if which == "ours":
            return ours.to(DEVICE)
        row = {key: VARIANTS[self.model][key] for key in ("embed_dim", "depth", "num_heads")}
        theirs = timm.create_model(
            "cait_xxs24_224", img_size=self.img_size, drop_path_rate=self.drop_path_rate, init_values=1.0, **row
        )
        theirs.load_state_dict(ours.state_dict(), strict=True)
        return theirs.to(DEVICE)


def stepper(case: Case, which: str, batch: int, dtype: torch.dtype, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Calls for a forward pass in evaluation and for a whole training step."""
    model = case.build(which)
    if which == "ours":
        optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05, no_weight_decay_list=()), lr=1e-4)
    run = torch.compile(model) if compiled else model
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, case.img_size, case.img_size, generator=generator).to(DEVICE)
    targets = torch.rand(batch, 1000, generator=generator).softmax(dim=1).to(DEVICE)

    def autocast() -> Any:
        return torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32)

    def forward() -> Tensor:
        model.eval()
        with torch.no_grad(), autocast():
            return run(images)

    def step() -> Tensor:
        model.train()
        with autocast():
            loss = F.cross_entropy(run(images).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return {"forward": forward, "step": step}


def seconds(call: Callable[[], Any]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def resident(what: str) -> float:
    """MiB of this process's memory now (VmRSS) or at its highest (VmHWM); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(what))


def peak_memory(case: str, which: str, batch: int, dtype: torch.dtype, compiled: bool, out: Any) -> None:
    """Put the MiB that training steps need, weights and optimiser included."""
    before = resident("VmRSS")
    step = stepper(Case(case), which, batch, dtype, compiled)["step"]
    for _ in range(2):  # the second has the optimiser's moments
        step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # lowers the high-water mark to what there is now
    step()
    out.put(torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else resident("VmHWM") - before)


def in_a_process(*arguments: Any) -> float:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=peak_memory, args=(*arguments, out))
    process.start()
    value = out.get()
    process.join()
    return value


def measure(name: str, batch: int, rounds: int, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    sides = {which: stepper(Case(name), which, batch, dtype, compiled) for which in ("timm", "ours")}
    found: dict[str, Any] = {
        "case": name,
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": compiled,
    }
    for what in ("forward", "step"):
        times: dict[str, list[float]] = {which: [] for which in sides}
        for side in sides.values():
            for _ in range(3 if compiled else 1):
                side[what]()
        for turn in range(rounds):
            for which in ("timm", "ours") if turn % 2 else ("ours", "timm"):
                times[which].append(seconds(sides[which][what]))
        found[f"{what}_timm_ms"], found[f"{what}_ours_ms"] = (
            1e3 * statistics.median(times[k]) for k in ("timm", "ours")
        )
        found[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(times["timm"], times["ours"], strict=True))
    del sides
    memory = [in_a_process(name, which, batch, dtype, compiled) for which in ("timm", "ours")]
    found["memory_timm_mib"], found["memory_ours_mib"] = memory
    found["memory_ratio"] = memory[1] / memory[0]
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | batch | precision | forward: timm, ours, ratio | step: the same | peak memory: the same |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        precision = r["dtype"] + (", compiled" if r["compiled"] else "")
        times = (
            f"{r[f'{what}_timm_ms']:.0f} ms, {r[f'{what}_ours_ms']:.0f} ms, **{r[f'{what}_ratio']:.2f}×**"
            for what in ("forward", "step")
        )
        memory = f"{r['memory_timm_mib']:.0f} MiB, {r['memory_ours_mib']:.0f} MiB, {r['memory_ratio']:.2f}×"
        lines.append(f"| {r['case']} | {r['batch']} | {precision} | {' | '.join(times)} | {memory} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    parser.add_argument("--tag", help="a word for the files' names")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    rows = []
    for name in options.cases:
        rows.append(measure(name, options.batch, options.rounds, dtype, options.compile))
        print(*table(rows)[-1:], sep="\n", flush=True)
    if options.out:
        date = stamp().split(",")[0]
        words = "".join(letter if letter.isalnum() else "-" for letter in device_name().lower())
        base = options.out / "-".join(word for word in ("step", words, options.tag, date) if word)
        base.with_suffix(".json").write_text(json.dumps({"stamp": stamp(), "rows": rows}, indent=1) + "\n")
        title = [
            "# A training step, ours beside timm's",
            "",
            stamp(),
            "",
            f"`python benchmarks/step.py`, timm {timm.__version__}",
            "",
        ]
        base.with_suffix(".md").write_text("\n".join([*title, *table(rows)]) + "\n")


if __name__ == "__main__":
    main()
