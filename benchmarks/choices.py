"""Whether the ways to compute the same thing train as well: ten epochs of digits, each with the same seeds.

    python benchmarks/choices.py [--seeds 3] [--out benchmarks/choices.md]

The defaults among them were chosen by this table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from digits import train
from report import stamp

COMMON = ["--trainer.max_epochs=10", "--model.drop_path_rate=0.2"]
CHOICES = {
    "the defaults: attention recomputed, drop path skip, images by nvImageCodec": [],
    "attention reference": ["--model.fields.attention_backend=reference"],
    "compiled": ["--model.compile=true"],
    "drop path mask, as published": ["--model.fields.drop_path_mode=mask"],
    "drop path subset": ["--model.fields.drop_path_mode=subset"],
    "images by torchvision": ["--data.backend=torchvision"],
    "images by Pillow": ["--data.backend=pillow"],
    "images by timm's transform": ["--data.backend=timm"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "# Ways to compute the same: accuracy after ten epochs of digits",
        "",
        f"`python benchmarks/choices.py --seeds {options.seeds}`, {stamp()}. Stochastic depth .2; 360 validation",
        "images, so that one image is 0.28 points.",
        "",
        "| | val/acc1 of each seed | mean |",
        "|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as root:
        for number, (name, settings) in enumerate(CHOICES.items()):
            scores = [train(seed, f"{root}/{number}", COMMON + settings)[0] for seed in range(options.seeds)]
            shown = ", ".join(f"{score:.2f}" for score in scores)
            lines.append(f"| {name} | {shown} | {statistics.mean(scores):.2f} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
