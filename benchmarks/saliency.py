"""Whether the class token of the digits' network reads the strokes: benchmarks/saliency.md.

    for seed in 0 1 2; do cait fit --config configs/digits.yaml --seed_everything $seed --run_name digits-$seed; done
    python benchmarks/saliency.py digits-0 digits-1 digits-2

For each validation image, the share of the first class-attention block's map that lies on the pixels of strokes,
beside the share that these pixels are of the image. A map that ignores the image has the second share on average,
unless it knows where strokes mostly are. So the map is also laid on the strokes of the next image in the set, which
is mostly of the same class, and of one half the set away, which is of another.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import stamp
from torch import Tensor

from cait.ckpt import read_checkpoint
from cait.cli.loading import checkpoint_of, from_checkpoint
from cait.extras.visualize.attention import on_grid, saliency
from cait.model.network import rebuild

HERE = Path(__file__).parent
THRESHOLD = 0.5
"""A pixel of a stroke is brighter than this, where 0 is black and 1 is white."""


def share(maps: Tensor, strokes: Tensor) -> Tensor:
    """Share of each map [B, S, S], none of it negative, that lies on the pixels of strokes, bool [B, S, S]."""
    return (maps * strokes).sum(dim=(1, 2)) / maps.sum(dim=(1, 2))


def spread(weights: Tensor, size: int) -> Tensor:
    """Weights of patches [B, s, s] over their pixels, [B, size, size], evenly in each patch."""
    factor = size // weights.shape[-1]
    return weights.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)


def measure(network: Any, data: Any) -> dict[str, float]:
    """Mean shares over the validation set, in per cent."""
    weights, images = [], []
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.preprocessing.mean, data.preprocessing.std))
    for batch, _ in data.val_dataloader():
        weights.append(on_grid(network.maps(batch).class_attention[0][:, :, 0]))  # [B, h, s, s]
        images.append((batch * std + mean).mean(dim=1))
    heads, grey = torch.cat(weights), torch.cat(images)
    size, strokes = grey.shape[-1], grey > THRESHOLD
    maps = spread(heads.mean(dim=1), size)
    drawn = torch.stack([saliency(one, size) for one in heads.mean(dim=1)])
    most = F.avg_pool2d(strokes.float(), size // heads.shape[-1]).flatten(1).amax(dim=1)
    pixels, ours = strokes.float().mean(dim=(1, 2)), share(maps, strokes)
    found = {
        "pixels of strokes in the image": pixels.mean(),
        "all weight on the patch with most of them": most.mean(),
        "map, mean of heads": ours.mean(),
        "the same on the next image's strokes": share(maps, strokes.roll(-1, dims=0)).mean(),
        "the same on the strokes half the set away": share(maps, strokes.roll(len(strokes) // 2, dims=0)).mean(),
        "map as drawn: scaled, bicubic": share(drawn, strokes).mean(),
        "images whose map has more than the pixels' share": (ours > pixels).float().mean(),
    }
    found |= {
        f"map of head {head}": share(spread(heads[:, head], size), strokes).mean() for head in range(heads.shape[1])
    }
    return {name: 100 * float(value) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    given = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for name in given.runs:
        checkpoint, folder = checkpoint_of(name, "measure")
        loaded = from_checkpoint(checkpoint, folder, ema=False)
        loaded.data.setup("validate")
        columns[name] = measure(loaded.network, loaded.data)
        if name == given.runs[0]:
            torch.manual_seed(0)
            fresh = rebuild(read_checkpoint(checkpoint)["hyper_parameters"]).eval()
            columns["untrained"] = measure(fresh, loaded.data)
    rows = list(columns[given.runs[0]])
    lines = [
        "# Digits: does saliency lie on the strokes?",
        "",
        f"`python benchmarks/saliency.py {' '.join(given.runs)}`, {stamp()}.",
        "Runs of `configs/digits.yaml`, named after their seeds, and the network before training. The map is that of "
        "the first class-attention block in the best checkpoint. 360 validation images of 16 × 16 pixels, "
        f"4 × 4 patches; a stroke's pixel is brighter than {THRESHOLD}. Mean shares in per cent.",
        "",
        f"| share on strokes | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(f"| {row} | {' | '.join(f'{column[row]:.1f}' for column in columns.values())} |" for row in rows),
    ]
    (HERE / "saliency.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
