"""Plan a training on many GPUs on paper: `python benchmarks/plan.py --out benchmarks`.

Measured in this repository: the images a second of a loader's core, the size of a file (benchmarks/input-*.json), and
the seconds that a checkpoint takes a GB. Everything else is arithmetic from the count of multiply-adds, the peak of a
GPU by its data sheet, and the share of it that is assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cait.extras.paper.zoo import zoo

HERE = Path(__file__).resolve().parent
PEAK = {"A100": 312e12, "H100 or H200 SXM": 989e12}
"""Dense bf16 operations a second, from NVIDIA's data sheets."""
DATA = {"ImageNet-1k": (1_281_167, 1000), "ImageNet-21k": (14_197_122, 21_841)}
"""Images to train on, and classes."""
GPUS_A_NODE = 8
BATCH = 128
"""Images of one process in a step, as published."""
EPOCHS = 400
SECONDS_A_GB = 2.0
"""To write a checkpoint, in processor time: docs/resume.md. The disk's own time comes on top."""
HAS = {"cores": 96, "storage": 2e9, "network": 100e9 / 8}
"""What a node is assumed to have: cores for loaders, and bytes a second that it reads and that it sends."""


@dataclass(frozen=True)
class Loading:
    """What a loader's core does, and what it reads, in one way to read images."""

    seconds_an_image: float
    """At 224 pixels, in the recipe's augmentation."""
    decode_seconds: float
    """The part of an image's time that does not grow with the crop."""
    file_bytes: float

    def seconds(self, img_size: int) -> float:
        """Of one core for an image; all but the decoding grows with the number of pixels."""
        rest = self.seconds_an_image - self.decode_seconds
        return self.decode_seconds + rest * (img_size / 224) ** 2


WAYS = {
    "whole files": "ours",
    "at most 400 pixels": "ours, from shards of at most 400 pixels",
    "raw pixels": "ours, from raw shards",
}
"""Ways to read images, as rows of `benchmarks/input.py`."""
SHARDS = {"ours, from shards of at most 400 pixels": "small", "ours, from raw shards": "raw"}


@dataclass(frozen=True)
class Need:
    """What a run needs to keep its GPUs busy."""

    images_a_second: float
    """Of a node."""
    network: float
    """Bytes a second that each node sends, for gradients in float32; 0 on one node."""
    checkpoint: float
    """Bytes: weights, two moments and the moving average, in float32."""
    hours: float

    def breaks_first(self, img_size: int, loading: Loading) -> str:
        """Cores for loaders, GB/s of files, and what a node has least of beside its need; the GPUs if it has enough."""
        cores, storage = (self.images_a_second * each for each in (loading.seconds(img_size), loading.file_bytes))
        needs = {"cores": cores, "storage": storage, "network": self.network}
        name, share = max(((name, need / HAS[name]) for name, need in needs.items()), key=lambda pair: pair[1])
        first = f"{name} at {1 / share:.0%}" if share > 1 else "GPUs"
        return f"{cores:,.0f} · {storage / 1e9:.1f} · {first}"


def loadings(path: Path) -> dict[str, Loading]:
    """The ways, from a record of `benchmarks/input.py --levels decode tree`."""
    record = json.loads(path.read_text())
    decode = next(row for row in record["levels"]["decode"] if row["side"] == "nvImageCodec, the crop")["seconds"]
    spent = {row["side"]: row["seconds"] for row in record["levels"]["tree"]}
    rest = spent["ours"] - decode  # header, crop, resize, RandAugment, hand-over
    found = {}
    for way, side in WAYS.items():
        kilobytes = record["kilobytes"][SHARDS[side]] if side in SHARDS else record["kilobytes_a_file"]
        decoding = max(0.0, spent[side] - rest) if side in SHARDS else decode
        found[way] = Loading(spent[side], decoding, 1e3 * kilobytes)
    return found


def need(parameters: int, gmacs: float, images: int, nodes: int, flops: float) -> Need:
    """What a run needs.

    Args:
        parameters: of the network.
        gmacs: of a forward pass on one image; the backward pass takes twice as many.
        images: of the data set.
        nodes: of GPUS_A_NODE GPUs.
        flops: operations a second that a GPU really does.
    """
    gpus = nodes * GPUS_A_NODE
    speed = gpus * flops / (6e9 * gmacs)
    steps = speed / (gpus * BATCH)
    return Need(
        images_a_second=speed / nodes,
        network=steps * 4 * parameters * 2 * (nodes - 1) / nodes,  # a ring between the nodes
        checkpoint=4 * 4 * parameters,
        hours=EPOCHS * images / speed / 3600,
    )


def lines(mfu: float, ways: dict[str, Loading], source: str) -> Iterator[str]:
    """The plan in Markdown."""
    yield "# Training CaiT on 8 and on 64 GPUs, on paper"
    yield ""
    yield f"`python benchmarks/plan.py --mfu {mfu}`. **No row has been run.**"
    yield ""
    yield f"Measured ({source}), on a loader's core at 224 pixels:"
    yield ""
    yield "| images are read as | ms an image | of it decoding | kB an image |"
    yield "|---|---|---|---|"
    for name, way in ways.items():
        milliseconds = f"{1e3 * way.seconds_an_image:.2f} | {1e3 * way.decode_seconds:.2f}"
        yield f"| {name} | {milliseconds} | {way.file_bytes / 1e3:.0f} |"
    yield ""
    yield (
        f"Arithmetic: 6 operations for each multiply-add of the forward pass; {mfu:.0%} of the dense bf16 peak, which "
        f"is assumed ({', '.join(f'{name} {peak / 1e12:.0f}' for name, peak in PEAK.items())} TFLOPS); "
        f"{BATCH} images on each GPU; an augmentation whose time grows with the pixels; gradients in float32 around "
        f"a ring of nodes; weights, two moments and the moving average in a checkpoint, {SECONDS_A_GB:.0f} s of "
        "processor time for a GB."
    )
    yield (
        f"The last three columns say how many cores a node needs for loaders, how many GB/s it reads if it caches "
        f"nothing, and what breaks first where a node has {HAS['cores']} cores for loaders, reads "
        f"{HAS['storage'] / 1e9:.0f} GB/s and sends {HAS['network'] / 1e9:.1f} GB/s, with the share of the GPUs' speed "
        "that is left."
    )
    for data, (images, classes) in DATA.items():
        for nodes in (1, 8):
            for gpu, peak in PEAK.items():
                yield from ["", f"## {data}, {nodes} × {GPUS_A_NODE} {gpu}", ""]
                yield from _table(images, classes, nodes, mfu * peak, ways)


def _table(images: int, classes: int, nodes: int, flops: float, ways: dict[str, Loading]) -> Iterator[str]:
    heads = ["model", "images/s", "sends a node", "checkpoint", "400 epochs", *ways]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in zoo():
        parameters = row["parameters"] + (classes - 1000) * (row["embed_dim"] + 1)  # of a wider head
        wants = need(parameters, row["gmacs"], images, nodes, flops)
        gigabytes = wants.checkpoint / 1e9
        cells = [
            f"{row['model']} @{row['img_size']}",
            f"{nodes * wants.images_a_second:,.0f}",
            f"{wants.network / 1e6:,.0f} MB/s",
            f"{gigabytes:.2f} GB, {SECONDS_A_GB * gigabytes:.1f} s",
            f"{wants.hours:,.{0 if wants.hours >= 10 else 1}f} h",
            *(wants.breaks_first(row["img_size"], way) for way in ways.values()),
        ]
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mfu", type=float, default=0.3, help="share of the peak that a GPU is assumed to reach")
    parser.add_argument(
        "--input",
        type=Path,
        default=max(HERE.glob("input-*-decode-tree-*.json"), default=None),
        help="a record of input.py",
    )
    parser.add_argument("--out", type=Path, help="folder for plan.md; printed without it")
    given = parser.parse_args(arguments)
    text = "\n".join(lines(given.mfu, loadings(given.input), given.input.with_suffix(".md").name)) + "\n"
    if given.out:
        (given.out / "plan.md").write_text(text)
        print(given.out / "plan.md")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
