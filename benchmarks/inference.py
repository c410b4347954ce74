"""How fast networks classify: CaiT as it was trained and folded, beside timm's CaiT and a ViT-S.

    python benchmarks/inference.py [--models xxs24 s24] [--batch 1 32] [--rounds 9] [--out FILE]
    python benchmarks/inference.py --script inference.py [--images 512] [--out FILE]
    python benchmarks/inference.py --reckon

On the CPU it uses one core and counts processor time, because other jobs may run beside it; on a GPU it times bfloat16.
The sides take turns; a ratio is the median of the rounds'. --script races `cait predict` over a folder of photographs
with timm's inference script, which is in its repository alone and needs pandas: whole commands, with all cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from report import DEVICE, REPO, in_turns, median_ms, processor_ms, ratios, show, stamp

from cait import create_model
from cait.model.network import for_inference

VIT = "vit_small_patch16_224"


def networks(name: str, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """The sides by name: timm's, ours with the same weights, and a ViT-S."""
    theirs = timm.create_model(f"cait_{name}_224")

    def ours(backend: str = "auto") -> Any:
        network = create_model(name, attention_backend=backend)
        network.load_state_dict(theirs.state_dict())
        return network.to(DEVICE, dtype).eval()

    sides = {"timm": theirs.to(DEVICE, dtype).eval(), "here, as trained": ours()}
    if DEVICE == "cuda":
        sides |= {f"here, folded, {backend}": for_inference(ours(backend)) for backend in ("recompute", "fused")}
    else:
        sides["here, folded"] = for_inference(ours())
    if compiled:
        portable = for_inference(ours("fused" if DEVICE == "cuda" else "auto"), portable=DEVICE == "cpu")
        sides |= {"timm, compiled": torch.compile(theirs), "here, folded and compiled": torch.compile(portable)}
    return sides | {"timm's ViT-S": timm.create_model(VIT).to(DEVICE, dtype).eval()}


def race(sides: dict[str, Callable[[], Any]], rounds: int) -> list[tuple[str, float, float]]:
    """Each side, its median in milliseconds, and how many times as fast it is as the first."""
    times = in_turns(sides, rounds, partial(median_ms, rounds=5) if DEVICE == "cuda" else processor_ms)
    faster = ratios(times, next(iter(sides)))
    return [(side, median(took), faster[side]) for side, took in times.items()]


@torch.inference_mode()
def table(models: list[str], batches: list[int], rounds: int, compiled: bool) -> list[str]:
    lines = ["| | images at a time | ms an image | timm's CaiT = 1 |", "|---|---|---|---|"]
    for name in models:
        sides = networks(name, torch.bfloat16 if DEVICE == "cuda" else torch.float32, compiled)
        for batch in batches:
            images = torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=next(sides["timm"].parameters()).dtype)
            for side, took, ratio in race({side: partial(made, images) for side, made in sides.items()}, rounds):
                lines.append(f"| {name}: {side} | {batch} | {took / batch:.2f} | {ratio:.2f}× |")
    return lines


def folder(script: Path, name: str, count: int, rounds: int) -> list[str]:
    """`cait predict` beside timm's script: seconds of the clock for a folder of photographs."""
    from input import prepare

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        prepare(root / "all", min(count, 600), count)
        classes = len(list((root / "all/train").iterdir()))
        few = root / "few/train/one"
        few.mkdir(parents=True)
        (few / "0.jpg").symlink_to(next((root / "all/train").glob("*/*")))
        peer = timm.create_model(f"cait_{name}_224", num_classes=classes)
        run = _run(root, name, peer)
        torch.save(peer.state_dict(), weights := root / "weights.pth")
        sides: dict[str, Callable[[Path], list[str]]] = {
            "timm's script": lambda images: [
                *(str(script), "--data-dir", str(images), "--split", "train"),
                *("--model", f"cait_{name}_224", "--checkpoint", str(weights), "--device", "cpu"),
                *("--num-classes", str(classes), "--results-dir", str(root / "results")),
            ],
            "cait predict": lambda images: [
                *("-m", "cait", "predict", str(run), str(images / "train")),
                *("--output", str(root / "found.csv")),
            ],
        }
        took: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for side, command in sides.items():
                for images in (root / "few", root / "all"):
                    (root / "found.csv").unlink(missing_ok=True)
                    begin = time.perf_counter()
                    subprocess.run([sys.executable, *command(images)], cwd=root, check=True, capture_output=True)
                    took.setdefault((side, images.name), []).append(time.perf_counter() - begin)
    lines = [
        f"| {name}, a folder of {count} images | seconds | seconds to start | images/s after the start |",
        "|---|---|---|---|",
    ]
    for side in sides:
        whole, start = (median(took[side, size]) for size in ("all", "few"))
        lines.append(f"| {side} | {whole:.1f} | {start:.1f} | {count / (whole - start):.1f} |")
    faster = ratios({side: took[side, "all"] for side in sides}, "timm's script")["cait predict"]
    return [
        *lines,
        "",
        f"In whole seconds `cait predict` is {faster:.2f} times as fast ({rounds} rounds in turns).",
    ]


def _run(root: Path, name: str, peer: Any) -> Path:
    """A run of one step, whose checkpoint then gets the weights of timm's network."""
    settings = [
        "--trainer.max_steps=1",
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=0",
        "--data.batch_size=2",
    ]
    sizes = [f"--model.name={name}", "--data.num_workers=0", "--data.eval_batch_size=32"]
    command = ["fit", f"--config={REPO}/configs/imagenet/xxs24_224.yaml", f"--data.root={root}/all", "--run_name=one"]
    subprocess.run([sys.executable, "-m", "cait", *command, *settings, *sizes], cwd=root, check=True)
    path = root / "logs/one/checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True)
    content["state_dict"] = {f"model.{key}": value for key, value in peer.state_dict().items()}
    torch.save(content, path)
    shutil.copy(path, path.with_name("best.ckpt"))
    return root / "logs/one"


def reckoned(name: str) -> list[str]:
    """The forward pass of a block on an H100 in bfloat16: bytes an image, and what they take at 3 TB/s.

    A map is [h, N, N], rows padded to 16 columns here; tokens are [N, d]. Of maps timm's eager form writes the scores,
    copies and mixes them, takes the softmax, mixes, copies for the product, and reads: 12 passes. Ours needs 8, the
    kernel `fused` 4. Of tokens: the norms, linear layers, GELU, the heads' copies and sums; timm's LayerScale adds 6.
    """
    config = create_model(name).config
    N, h, d, depth = config.num_patches, config.num_heads, config.embed_dim, config.depth
    tokens, own_map, padded_map = (2 * size / 1e6 for size in (N * d, h * N * N, h * N * (-(-N // 16) * 16)))
    ways = {
        f"{name}: timm": depth * (12 * own_map + 45 * tokens),
        f"{name}: folded, recompute": depth * (8 * padded_map + 39 * tokens),
        f"{name}: folded, fused": depth * (4 * padded_map + 39 * tokens),
        "timm's ViT-S": 12 * 33 * 2 * 197 * 384 / 1e6,  # no maps: flash attention
    }
    return [
        f"| {way} | {megabytes:.0f} | {megabytes / 3:.0f} | {1e6 * 3 / megabytes:,.0f} |"
        for way, megabytes in ways.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["xxs24", "s24"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="timm's and the folded one under torch.compile, too")
    parser.add_argument("--script", type=Path, help="timm's inference.py")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--reckon", action="store_true", help="bytes and seconds on an H100, by counting")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.reckon:
        lines = ["| | MB an image | µs | images/s |", "|---|---|---|---|"]
        lines += dict.fromkeys(line for name in given.models for line in reckoned(name))
    elif given.script:
        lines = folder(given.script.resolve(), given.models[0], given.images, given.rounds)
    else:
        torch.set_num_threads(1)
        lines = table(given.models, given.batch, given.rounds, given.compiled)
    head = f"{stamp()}, timm {timm.__version__}; `python {os.path.relpath(sys.argv[0], REPO)} {' '.join(sys.argv[1:])}`"
    show([head, "", *lines], given.out)


if __name__ == "__main__":
    main()
