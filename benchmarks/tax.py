"""The talking-heads tax: how much slower CaiT is than a ViT of timm's would be that had as much to compute.

    python benchmarks/tax.py [--cases s24-224 s24-384-compiled ...] [--backend fused] [--batch 64] [--out FOLDER]

Cases are those of step.py. With images a second of timm's ViT-S/16, which attends by PyTorch's fused
kernels, and of our CaiT, and their multiply-adds counted on both,

    tax = (ViT's images a second / (CaiT's multiply-adds / ViT's)) / CaiT's images a second

for a forward pass in evaluation and for a whole training step, in the same precision, both compiled
or neither. They take turns in each round; reported are medians and the median of the rounds' taxes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import step
import timm
import torch
from report import file_name, stamp, use_tilings, write
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cait.model.config import attention_backends

CASES = ["s24-224", "s24-384", "s24-224-compiled", "s24-384-compiled"]
BACKENDS = attention_backends()
VIT = "vit_small_patch16_224"


class Case(step.Case):
    """One of step.py's, whose other side is timm's ViT."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self.backend = backend

    def build(self, which: str) -> nn.Module:
        if which == "ours":
            model = super().build(which)
            for block in model.blocks:
                block.attn.backend = self.backend
            return model
        torch.manual_seed(0)
        model = timm.create_model(VIT, img_size=self.img_size, drop_path_rate=self.drop_path_rate)
        model.blocks_token_only = nn.ModuleList()  # where step.py looks for more blocks to compile
        return model.to(step.DEVICE)

    def flop_ratio(self) -> float:
        """CaiT's multiply-adds over ViT's."""
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            timm.create_model(VIT, img_size=self.img_size).eval()(torch.empty(1, 3, self.img_size, self.img_size))
        return step.model_flops(self, 1) / 3 / counter.get_total_flops()


def measure(name: str, backend: str, batch: int, rounds: int) -> dict[str, Any]:
    case = Case(name, backend)
    sides = {which: step.stepper(case, which, batch) for which in ("vit", "ours")}
    ratio = case.flop_ratio()
    found: dict[str, Any] = {"case": name, "backend": backend, "batch": batch, "flop_ratio": ratio}
    for what in ("forward", "step"):
        times = step.in_turns(sides, what, rounds)
        for which in sides:
            found[f"{what}_{which}_images_per_s"] = batch / statistics.median(times[which])
        found[f"{what}_tax"] = statistics.median(
            ours / vit / ratio for ours, vit in zip(times["ours"], times["vit"], strict=True)
        )
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | backend | batch | FLOP ratio | forward: ViT-S/16, ours, images/s, tax | step: the same |"]
    lines.append("|---|---|---|---|---|---|")
    for r in rows:
        rates = (
            f"{r[f'{what}_vit_images_per_s']:.1f}, {r[f'{what}_ours_images_per_s']:.1f}, **{r[f'{what}_tax']:.2f}**"
            for what in ("forward", "step")
        )
        lines.append(f"| {r['case']} | {r['backend']} | {r['batch']} | {r['flop_ratio']:.2f} | {' | '.join(rates)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--backend", nargs="+", default=["auto"], choices=BACKENDS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tilings", type=Path, help="tiles for the fused attention, as kernel.py --tune writes them")
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    parser.add_argument("--tag", help="a word for the files' names")
    options = parser.parse_args()
    use_tilings(options.tilings)
    rows = []
    for name in options.cases:
        for backend in options.backend:
            rows.append(measure(name, backend, options.batch, options.rounds))
            print(*table(rows)[-1:], sep="\n", flush=True)
    if options.out:
        title = ["# The talking-heads tax", "", stamp(), "", f"`python benchmarks/tax.py`, timm {timm.__version__}", ""]
        write(options.out, file_name("tax", options.tag), {"rows": rows}, [*title, *table(rows)])


if __name__ == "__main__":
    main()
