"""The input pipeline beside timm's and torchvision's, in one run, interleaved: a transform, loaders.

    python benchmarks/input.py [--levels transform loader] [--rounds 3] [--files 600] [--out FOLDER]

The images are made for it: crops of scikit-learn's two photographs, some mirrored, scaled by Lanczos
to 500 × 375 or 375 × 500, as JPEG of about 100 KB, ImageNet's size. In each round all sides take their
turns with the same images, at the first two levels with the same crops and, where timm's draws
are theirs, the same augmentation; reported are medians and the median of the rounds' ratios to timm's
way over Pillow.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import PIL
import timm
import torch
import torchvision
from PIL import Image
from report import file_name, stamp, write
from sklearn.datasets import load_sample_images
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ImageDataset,
    create_loader,
    create_transform,
)
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

from cait import seeds
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import seed_generators
from cait.data.loader import Key
from cait.extras.fast_input import decode

SIZE = 224
RECIPE: dict[str, Any] = dict(
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=None,
    interpolation="bicubic",
    re_prob=0.25,
    re_mode="pixel",
)
CLASSES, FILE_BYTES = 4, 100_000
A_TURN = 45
"""Pictures of a turn where they come one by one; a multiple of the 3 repeats."""
BACKENDS = ["auto", "timm"]
LEVELS = {
    "transform": "From the file to one augmented image, one thread: ratio to the processor time of timm's transform",
    "loader": "A loader with {workers} workers and batches of {batch}: ratio to the images a second of timm's loader",
}
NOTES = [
    "Torchvision's reference transforms are those of its references/classification with `--auto-augment ra",
    "--random-erase .25`, in their v2 form: its RandAugment is not the recipe's, and its filter is bilinear. The form",
    "over tensors has torchvision decode, too. With timm's prefetcher, and in ours, workers hand on uint8, which is",
    "normalized and erased by batch: on the device, or, where that is said, by this process on the CPU. A loader's",
    "clock starts at its first batch, when those of the other workers are as good as ready, so one batch for each",
    "worker is not counted.",
]
Row = dict[str, Any]
Turn = Callable[[int], float]
"""Seconds per image of the turn of that number."""


def prepare(root: Path, files: int, entries: int) -> float:
    """Write `files` images, and links to them up to `entries`, to root/train/<class>; mean size of a file in KB."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]

    def make_image(number: int) -> Image.Image:
        rng = random.Random(number)
        whole, lies = photographs[number % 2], rng.random() < 0.75
        size = (500, 375) if lies else (375, 500)
        scale = rng.uniform(0.6, 1.0) * min(whole.width / size[0], whole.height / size[1])
        width, height = scale * size[0], scale * size[1]
        left, top = rng.uniform(0, whole.width - width), rng.uniform(0, whole.height - height)
        made = whole.resize(
            size, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height)
        )
        return made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else made

    def encoded(image: Image.Image, quality: int) -> bytes:
        image.save(file := BytesIO(), "JPEG", quality=quality)
        return file.getvalue()

    some = [make_image(number) for number in range(8)]
    quality = min(
        range(85, 100),
        key=lambda quality: abs(
            statistics.mean(len(encoded(image, quality)) for image in some) - FILE_BYTES
        ),
    )
    sizes, paths = (
        [],
        [
            root / "train" / f"class{number % CLASSES}" / f"{number:06}.jpg"
            for number in range(entries)
        ],
    )
    for label in range(CLASSES):
        for split in ("train", "val"):
            (root / split / f"class{label}").mkdir(parents=True)
        (root / "val" / f"class{label}" / "0.jpg").symlink_to(paths[label])
    for number, path in enumerate(paths):
        if number < files:
            sizes.append(path.write_bytes(encoded(make_image(number), quality)))
        else:
            path.hardlink_to(paths[number % files])  # a symbolic link would be the same image
    return statistics.mean(sizes) / 1e3


def race(sides: dict[str, Turn], rounds: int, turns: int = 1) -> list[Row]:
    """Have the sides take turns, `turns` in a round and each time in another order; ratios are to the first of them.

    A machine that others use changes its speed within a second, so the turns had better be short.
    """
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for first in range(0, rounds * turns, turns):
        spent = dict.fromkeys(names, 0.0)
        for turn in range(first, first + turns):
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                spent[name] += sides[name](turn) / turns
        for name in names:
            times[name].append(spent[name])
    ratios = {
        name: [a / b for a, b in zip(times[names[0]], times[name], strict=True)] for name in names
    }
    return [
        {
            "side": name,
            "seconds": statistics.median(times[name]),
            "ratio": statistics.median(ratios[name]),
            "ratios": ratios[name],
        }
        for name in names
    ]


def one_by_one(
    call: Callable[[Any], Any],
    items: Callable[[int], list[Any]],
    images: int = 1,
    seed: bool = False,
) -> Turn:
    """Call once for each key; each call gives `images`. With `seed`, timm draws the same numbers for a key as we do."""

    def run(turn: int, most: int | None = None) -> float:
        seconds, chosen = 0.0, items(turn)[:most]
        for item in chosen:
            if seed:  # not within the time
                seed_generators(seeds.image(0, *item))
            begin = time.process_time()  # of all threads, and without what other processes take
            call(item)
            seconds += time.process_time() - begin
        return seconds / len(chosen) / images

    run(0, most=4)  # what is made once
    return run


def torchvision_reference(over: str) -> v2.Compose:
    """The transform of torchvision's references/classification, over "pil" or "tensor"."""
    bilinear = InterpolationMode.BILINEAR
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, interpolation=bilinear, antialias=True),
            v2.RandomHorizontalFlip(0.5),
            v2.RandAugment(interpolation=bilinear, magnitude=9),
            *([v2.PILToTensor()] if over == "pil" else []),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
            v2.RandomErasing(RECIPE["re_prob"]),
            v2.ToPureTensor(),
        ]
    )


def open_tensor(path: str) -> torch.Tensor:
    return decode_image(path, ImageReadMode.RGB)


def open_rgb(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


OPENED = {"pil": open_rgb, "tensor": open_tensor}


def ours(root: Path | str, backend: str, repeats: int = 1, **settings: Any) -> ImageNetDataModule:
    """The data module with the recipe, which is its default; no image may be bad."""
    datamodule = ImageNetDataModule(
        str(root), backend=backend, repeats=repeats, max_bad_share=0.0, **settings
    )
    datamodule.setup()
    return datamodule


def measure_transform(root: Path, backends: list[str], rounds: int, turns: int) -> list[Row]:
    sets = {backend: ours(root, backend).train_images for backend in backends}
    samples = sets["timm"].samples
    floats, bytes_ = (
        create_transform(SIZE, is_training=True, use_prefetcher=prefetched, **RECIPE)
        for prefetched in (False, True)
    )
    references = {over: torchvision_reference(over) for over in OPENED}

    def keys(turn: int) -> list[Key]:
        return [
            (turn, index, 0) for index in random.Random(turn).choices(range(len(samples)), k=A_TURN)
        ]

    def path(key: Key) -> str:
        return str(samples[key[1]][0])

    sides = {
        "timm, float32": one_by_one(lambda key: floats(open_rgb(path(key))), keys, seed=True),
        "timm, for its prefetcher": one_by_one(
            lambda key: bytes_(open_rgb(path(key))), keys, seed=True
        ),
    }
    for over in OPENED:
        sides[f"torchvision's reference over {over}"] = one_by_one(
            lambda key, over=over: references[over](OPENED[over](path(key))), keys, seed=True
        )
    for backend in backends:
        sides[f"ours, {backend}"] = one_by_one(lambda key, own=sets[backend]: own[key], keys)
    for backend in backends:
        sides[f"ours, {backend}, 3 repeats"] = one_by_one(
            lambda key, own=sets[backend]: own.__getitems__(
                [(*key[:2], repeat) for repeat in range(3)]
            ),
            lambda turn: keys(turn)[::3],
            images=3,
        )
    return race(sides, rounds, turns)


def loaders(root: Path, backends: list[str], batch: int, workers: int) -> dict[str, Iterable[Any]]:
    common: dict[str, Any] = dict(batch_size=batch, num_workers=workers, persistent_workers=True)
    found: dict[str, Iterable[Any]] = {}
    for name, prefetched in (("timm", False), ("timm, its prefetcher on this CPU", True)):
        found[name] = create_loader(
            ImageDataset(str(root / "train")),
            SIZE,
            is_training=True,
            use_prefetcher=prefetched,
            device=torch.device("cpu"),
            **common,
            **RECIPE,
        )
    for over, opened in OPENED.items():
        dataset = ImageFolder(str(root / "train"), torchvision_reference(over), loader=opened)
        found[f"torchvision's reference over {over}"] = DataLoader(
            dataset, shuffle=True, drop_last=True, **common
        )
    settings = dict(batch_size=batch, num_workers=workers)
    for backend in backends:
        found[f"ours, {backend}, as the workers hand on"] = loader = ours(
            root, backend, **settings
        ).train_dataloader()
        loader.finish = None
    found[f"ours, {backends[0]}, finished on this CPU"] = ours(
        root, backends[0], **settings
    ).train_dataloader()
    found[f"ours, {backends[0]}, 3 repeats"] = loader = ours(
        root, backends[0], 3, **settings
    ).train_dataloader()
    loader.finish = None
    return found


def one_pass(loader: Iterable[Any], batch: int, workers: int) -> Turn:
    def run(turn: int) -> float:
        batches = iter(loader)
        next(batches)
        begin = time.perf_counter()
        count = 1 + sum(1 for _ in batches)
        return (time.perf_counter() - begin) / ((count - workers) * batch)

    run(-1)  # starts the workers, which stay
    return run


def measure_loader(
    root: Path, backends: list[str], rounds: int, batch: int, workers: int
) -> list[Row]:
    sides = loaders(root, backends, batch, workers)
    return race({name: one_pass(loader, batch, workers) for name, loader in sides.items()}, rounds)


def versions() -> str:
    try:
        codec = decode.nvimgcodec(os.getpid())[0].__version__
    except (ImportError, RuntimeError):
        codec = "none"
    return (
        f"Python {platform.python_version()}, Pillow {PIL.__version__}, torchvision {torchvision.__version__}, "
        f"timm {timm.__version__}, nvImageCodec {codec}"
    )


def table(rows: list[Row], rate: bool) -> list[str]:
    lines = [f"| | {'images a second' if rate else 'ms per image'} | ratio |", "|---|---|---|"]
    for row in rows:
        number = f"{1 / row['seconds']:.0f}" if rate else f"{1e3 * row['seconds']:.2f}"
        lines.append(f"| {row['side']} | {number} | **{row['ratio']:.2f}×** |")
    return lines


def main(arguments: list[str] | None = None) -> dict[str, list[Row]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=600)
    parser.add_argument("--turns", type=int, default=5, help=f"of {A_TURN} images in a round")
    parser.add_argument("--pass-batches", type=int, default=10, help="batches of a loader's round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="as small as it can be, only to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    batch, how = 128, (options.rounds, options.turns)
    if options.quick:
        options.files, options.pass_batches, batch, how = 8, 6, 4, (1, 1)
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        entries = max(options.files, options.pass_batches * batch)
        size = prepare(root, options.files, entries)
        made = f"{options.files} files of {size:.0f} KB on average, and links to them, {entries} in all"
        print(stamp(), versions(), made, sep="\n", flush=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        if "transform" in options.levels:
            found["transform"] = measure_transform(root, BACKENDS, *how)
        torch.set_num_threads(threads)
        if "loader" in options.levels:
            found["loader"] = measure_loader(root, BACKENDS, how[0], batch, options.workers)
    parts = []
    for level, rows in found.items():
        heading = f"## {LEVELS[level].format(workers=options.workers, batch=batch)}"
        parts += ["", heading, "", *table(rows, rate=level == "loader")]
    print(*parts, sep="\n")
    if options.out:
        command = " ".join(["python benchmarks/input.py", *given]).replace(
            str(options.out), "FOLDER"
        )
        record = dict(versions=versions(), command=command, kilobytes_a_file=size, levels=found)
        lines = [
            "# The input pipeline, ours beside its rivals",
            "",
            f"{stamp()}; {versions()}",
            "",
            f"`{command}`",
            "",
        ]
        lines += [
            f"{made}. The ratio is the median of the rounds', above 1 where a side is faster.",
            "",
        ]
        write(options.out, file_name("input"), record, [*lines, *NOTES, *parts])
    return found


if __name__ == "__main__":
    main()
