"""Where the time of a training step goes, part by part: timm's CaiT (before) and ours (after), in one run.

    python benchmarks/profile_step.py [--case s24-224] [--batch 8] [--rounds 15] [--out FOLDER]

Each part runs forward and backward by itself on inputs of its real shape, in bf16 autocast, the two
sides taking turns; its median is multiplied by how often the network has it. What the parts leave
of the whole step is in its last line: residual additions, accumulation of gradients, the loss.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import DEVICE, file_name, stamp
from step import Case, optimizer_of, seconds, stepper
from torch import Tensor, nn


def parts(model: nn.Module, batch: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """How often the network has a part, and a call that runs it forward and backward."""
    block, cls_block, depth = model.blocks[0], model.blocks_token_only[0], len(model.blocks)
    tokens, d = model.pos_embed.shape[1:]
    size = int(tokens**0.5) * model.patch_embed.proj.stride[0]
    x = torch.randn(batch, tokens, d, device=DEVICE, requires_grad=True)
    low = x.detach().bfloat16().requires_grad_()  # what autocast hands from layer to layer
    cls = torch.randn(batch, 1, d, device=DEVICE, requires_grad=True)
    images = torch.randn(batch, 3, size, size, device=DEVICE)

    def call(part: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                out = part(*inputs)
            out.backward(torch.ones_like(out))
            for parameter in [*model.parameters(), x, low, cls]:
                parameter.grad = None

        return run

    return {
        "patch embedding": (1, call(model.patch_embed, images)),
        "block": (depth, call(block, x)),
        "- norms": (2 * depth, call(block.norm1, x)),
        "- attention": (depth, call(block.attn, low)),
        "- - its qkv": (depth, call(block.attn.qkv, low)),
        "- - its projection": (depth, call(block.attn.proj, low)),
        "- feed-forward": (depth, call(block.mlp, low)),
        "class-attention block": (len(model.blocks_token_only), call(cls_block, x, cls)),
        "head": (1, call(model.head, low[:, 0])),
    }


def median_ms(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in calls.values():
        run()
    for _ in range(rounds):
        for name, run in calls.items():
            times[name].append(seconds(run))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="s24-224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for a Markdown file")
    options = parser.parse_args()
    case = Case(options.case)
    models = {which: case.build(which).train() for which in ("timm", "ours")}
    sides = {which: parts(model, options.batch) for which, model in models.items()}
    rows: dict[str, dict[str, float]] = {}
    for name, (count, _) in sides["ours"].items():
        found = median_ms({which: side[name][1] for which, side in sides.items()}, options.rounds)
        rows[name] = {which: count * value for which, value in found.items()}
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    rows["AdamW"] = median_ms({which: optimizer_of(models[which], which).step for which in models}, options.rounds)
    whole = median_ms({which: stepper(case, which, options.batch)["step"] for which in models}, options.rounds)
    outer = [name for name in rows if not name.startswith("-")]
    rows["the rest"] = {which: whole[which] - sum(rows[name][which] for name in outer) for which in models}
    rows["whole step"] = whole
    lines = [
        f"# Where the time of a training step of {options.case} goes",
        "",
        f"`python benchmarks/profile_step.py --case {options.case} --batch {options.batch}`, {stamp()}.",
        "Forward and backward, ms a step over all blocks; bf16 autocast, medians.",
        "",
        "| part | timm | ours | ratio |",
        "|---|---|---|---|",
        *(f"| {name} | {r['timm']:.2f} | {r['ours']:.2f} | {r['timm'] / r['ours']:.2f}× |" for name, r in rows.items()),
    ]
    print("\n".join(lines))
    if options.out:
        path = options.out / file_name("profile", options.case)
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
