"""The input pipeline beside its rivals, in one run, interleaved: decoding, one image's transform, loaders, shards.

    python benchmarks/input.py [--levels decode operations transform loader shards] [--rounds 3] [--files 600]
                               [--out FOLDER]
    python benchmarks/input.py --levels tree --rounds 7
    python benchmarks/input.py --levels --batches 1000 [--backends nvimgcodec torchvision pillow]

The images are made for it: crops of scikit-learn's two photographs, some mirrored, scaled by Lanczos
to 500 × 375 or 375 × 500, as JPEG of about 100 KB, ImageNet's size. In each round all sides take their
turns with the same images, at the first two levels with the same crops and, where timm's draws
are theirs, the same augmentation; reported are medians and the median of the rounds' ratios to timm's
way over Pillow. With `--batches` that many batches of 128 come through each backend's loader.

"tree" counts the processor time of all processes of a loader, ours in all its ways beside timm, torchvision, and those
of DALI, SPDL and FFCV that are installed: `pip install '.[rivals]'`, which FFCV wants Debian's libopencv-dev,
libturbojpeg0-dev, pkg-config and g++ for, and SPDL libavdevice59 and libavfilter8.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import loopback
import numpy as np
import PIL
import timm
import torch
import torchvision
from input_sides import RECIPE, SIZE, open_tensor, torchvision_reference
from PIL import Image
from report import REPO, commit, file_name, stamp, write
from sklearn.datasets import load_sample_images
from timm.data import ImageDataset, create_loader, create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import RandomResizedCrop

from cait import seeds
from cait.cli import main as cait_main
from cait.data.datamodule import ImageNetDataModule
from cait.data.dataset import seed_generators
from cait.data.loader import Backend
from cait.data.sampler import Key
from cait.errors import UserError
from cait.extras.fast_input import decode
from cait.extras.fast_input.augment import resize
from cait.extras.fast_input.ops import on_arrays

CLASSES, FILE_BYTES = 4, 100_000
A_TURN = 45
"""Pictures of a turn where they come one by one; a multiple of the 3 repeats."""
BACKENDS = [name for name in get_args(Backend) if name != "auto"]
LEVELS = {
    "operations": "RandAugment's operations at the recipe's magnitudes, one thread, from memory to memory",
    "decode": "Decoding, one thread, from memory: ratio to Pillow's processor time",
    "crop": f"Decoding, cropping and resizing to {SIZE}, one thread, from memory: ratio to Pillow's processor time",
    "transform": "From the file to one augmented image, one thread: ratio to the processor time of timm's transform",
    "loader": "A loader with {workers} workers and batches of {batch}: ratio to the images a second of timm's loader",
    "shards": "Our loader from shards, {workers} workers, batches of {batch}: ratio to its speed from a folder",
    "s3": "The same from S3",
    "tree": "The recipe without finishing: processor time of all processes of a loader with {workers} workers",
    "alone": "Crop and flip alone, likewise",
}
CHOICES = ["decode", "operations", "transform", "loader", "shards", "tree"]
NOTES = [
    "The crops are RandomResizedCrop's, bicubic. Difference: the mean of all pixels' from Pillow's, in levels of 255.",
    "Torchvision's reference transforms are those of its references/classification with `--auto-augment ra",
    "--random-erase .25`, in their v2 form: its RandAugment is not the recipe's, and its filter is bilinear. The form",
    "over tensors has torchvision decode, too. With timm's prefetcher, and in ours, workers hand on uint8, which is",
    "normalised and erased by batch: on the device, or, where that is said, by this process on the CPU. A loader's",
    "clock starts at its first batch, when those of the other workers are as good as ready, so one batch for each",
    "worker is not counted.",
]
SHARDS = [
    "S3 is moto's server on the loopback interface, in Python and on the same cores, without a network's latency. The",
    "cache is empty at the start of each pass and holds 8 of the {chunks} chunks, or all of them where that is said.",
    "Requests are those that the server answered, for chunks or parts of them.",
]
TREE = [
    "Crops have the same distribution on all sides. RandAugment is timm's in our rows and in timm's; DALI's, and",
    "torchvision's, which SPDL's row uses too, have other operations and bilinear warps. FFCV has none, writes JPEG",
    "files anew at quality 95, and resizes by OpenCV's area filter.",
]
WAYS: dict[str, dict[str, tuple[str, str]]] = {
    "tree": {
        "ours": ("ours", "folder"),
        "ours, 3 repeats decoded once": ("repeated", "folder"),
        "ours, from shards": ("ours", "shards"),
        "ours, from shards of at most 400 pixels": ("ours", "small"),
        "ours, from raw shards": ("ours", "raw"),
        "timm, for its prefetcher": ("timm", "folder"),
        "torchvision's reference over tensors": ("torchvision", "folder"),
        "DALI on the CPU": ("dali", "folder"),
        "SPDL over FFmpeg": ("spdl", "folder"),
    },
    "alone": {
        "ours": ("ours", "folder"),
        "ours, from shards of at most 400 pixels": ("ours", "small"),
        "ours, from raw shards": ("ours", "raw"),
        "ours, from raw shards of at most 400 pixels": ("ours", "raw-small"),
        "FFCV, JPEG": ("ffcv-jpeg", "folder"),
        "FFCV, raw": ("ffcv-raw", "folder"),
        "torchvision's reference over tensors": ("torchvision", "folder"),
        "DALI on the CPU": ("dali", "folder"),
        "SPDL over FFmpeg": ("spdl", "folder"),
    },
}
"""What is raced: a side of `input_sides.py`, and what it reads."""
SHARDS_OF = {
    "shards": [],
    "small": ["--max_side=400", "--quality=95"],
    "raw": ["--raw"],
    "raw-small": ["--raw", "--max_side=400"],
}
Row = dict[str, Any]
Turn = Callable[[int], float]
"""Seconds an image of the turn of that number."""


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
        made = whole.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height))
        return made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else made

    def encoded(image: Image.Image, quality: int) -> bytes:
        image.save(file := BytesIO(), "JPEG", quality=quality)
        return file.getvalue()

    some = [make_image(number) for number in range(8)]
    quality = min(
        range(85, 100),
        key=lambda quality: abs(statistics.mean(len(encoded(image, quality)) for image in some) - FILE_BYTES),
    )
    sizes, paths = [], [root / "train" / f"class{number % CLASSES}" / f"{number:06}.jpg" for number in range(entries)]
    for label in range(CLASSES):
        for split in ("train", "val"):
            (root / split / f"class{label}").mkdir(parents=True)
        (root / "val" / f"class{label}" / "0.jpg").symlink_to(paths[label])
    for number, path in enumerate(paths):
        if number < files:
            sizes.append(path.write_bytes(encoded(make_image(number), quality)))
        else:
            path.symlink_to(paths[number % files])
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
    ratios = {name: [a / b for a, b in zip(times[names[0]], times[name], strict=True)] for name in names}
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
    call: Callable[[Any], Any], items: Callable[[int], list[Any]], images: int = 1, seed: bool = False
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


def pillow_whole(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data)).convert("RGB")


def torchvision_whole(data: bytes) -> np.ndarray:
    """uint8 [height, width, 3]"""
    pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return pixels.permute(1, 2, 0).numpy()


def nvimgcodec_whole(data: bytes) -> np.ndarray:
    width, height = (stream := decode.JpegStream(data, "")).size
    return stream.crop((0, 0, height, width))


def measure_decode(root: Path, backends: list[str], rounds: int, turns: int) -> dict[str, list[Row]]:
    paths = [path for path in sorted(root.glob("train/*/*")) if not path.is_symlink()]

    def drawn(turn: int) -> list[tuple[bytes, decode.Box]]:
        rng = random.Random(turn)
        chosen = []
        for _ in range(A_TURN):
            data = rng.choice(paths).read_bytes()
            width, height = Image.open(BytesIO(data)).size
            torch.default_generator.manual_seed(rng.getrandbits(60))
            meta = torch.empty(3, height, width, device="meta")
            chosen.append((data, RandomResizedCrop.get_params(meta, RECIPE["scale"], RECIPE["ratio"])))
        return chosen

    def pillow_crop(item: tuple[bytes, decode.Box]) -> np.ndarray:
        top, left, height, width = item[1]
        image = pillow_whole(item[0]).crop((left, top, left + width, top + height))
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC))

    def torchvision_crop(item: tuple[bytes, decode.Box]) -> np.ndarray:
        return resize(decode.DecodedImage(torchvision_whole(item[0])).crop(item[1]), (SIZE, SIZE), "bicubic").numpy()

    def nvimgcodec_crop(item: tuple[bytes, decode.Box]) -> np.ndarray:
        return resize(decode.JpegStream(item[0], "").crop(item[1]), (SIZE, SIZE), "bicubic").numpy()

    whole: dict[str, Callable[[Any], Any]] = {
        "Pillow, whole": lambda item: pillow_whole(item[0]),
        "torchvision, whole": lambda item: torchvision_whole(item[0]),
    }
    cropped = {"Pillow": pillow_crop, "torchvision, resized by torch": torchvision_crop}
    if "nvimgcodec" in backends:
        whole["nvImageCodec, whole"] = lambda item: nvimgcodec_whole(item[0])
        whole["nvImageCodec, the crop"] = lambda item: decode.JpegStream(item[0], "").crop(item[1])
        cropped["nvImageCodec's crop, resized by torch"] = nvimgcodec_crop
    found = {
        level: race({name: one_by_one(call, drawn) for name, call in sides.items()}, rounds, turns)
        for level, sides in (("decode", whole), ("crop", cropped))
    }
    items = [item for turn in range(turns) for item in drawn(turn)]
    for row in found["crop"]:
        differences = [np.abs(cropped[row["side"]](item).astype(int) - pillow_crop(item)).mean() for item in items]
        row["difference"] = float(np.mean(differences))
    return found


def measure_operations(rounds: int, images: int) -> list[Row]:
    """Of RandAugment's operations, at magnitudes drawn as the recipe draws them: Pillow's time, ours, and pixels."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    rows = []
    for op in create_transform(SIZE, is_training=True, separate=True, **RECIPE)[1].transforms[0].ops:
        theirs, op.prob = op.aug_fn, 1.0
        ours_ = on_arrays(theirs)
        times: dict[Any, list[float]] = {theirs: [], ours_: []}
        differences = []
        for number in range(rounds * images):
            rng = random.Random(number)
            side = rng.randint(100, 375)
            corner = rng.randint(0, 640 - side), rng.randint(0, 427 - side)
            box = (*corner, corner[0] + side, corner[1] + side)
            image = photographs[number % 2].resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box)
            found = []
            for function, given in ((theirs, image), (ours_, np.array(image))):
                op.aug_fn = function
                random.seed(number)
                begin = time.process_time()
                found.append(op(given))
                times[function].append(time.process_time() - begin)
            differences.append(np.abs(np.asarray(found[0]).astype(int) - found[1]))
        rows.append(
            {
                "operation": op.name,
                "pillow": statistics.mean(times[theirs]),
                "ours": statistics.mean(times[ours_]),
                "mean": float(np.mean(differences)),
                "largest": int(np.max(differences)),
            }
        )
    return rows


def open_rgb(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


OPENED = {"pil": open_rgb, "tensor": open_tensor}


def ours(root: Path | str, backend: str, repeats: int = 1, **settings: Any) -> ImageNetDataModule:
    """The data module with the recipe, which is its default; no image may be bad."""
    datamodule = ImageNetDataModule(
        str(root), backend=backend, repeats=repeats, decode_once=repeats > 1, max_bad_share=0.0, **settings
    )
    datamodule.setup()
    return datamodule


def measure_transform(root: Path, backends: list[str], rounds: int, turns: int) -> list[Row]:
    sets = {backend: ours(root, backend).train_images for backend in backends}
    samples = sets["timm"].samples
    floats, bytes_ = (
        create_transform(SIZE, is_training=True, use_prefetcher=prefetched, **RECIPE) for prefetched in (False, True)
    )
    references = {over: torchvision_reference(over) for over in OPENED}

    def keys(turn: int) -> list[Key]:
        return [(turn, index, 0) for index in random.Random(turn).choices(range(len(samples)), k=A_TURN)]

    def path(key: Key) -> str:
        return str(samples[key[1]][0])

    sides = {
        "timm, float32": one_by_one(lambda key: floats(open_rgb(path(key))), keys, seed=True),
        "timm, for its prefetcher": one_by_one(lambda key: bytes_(open_rgb(path(key))), keys, seed=True),
    }
    for over in OPENED:
        sides[f"torchvision's reference over {over}"] = one_by_one(
            lambda key, over=over: references[over](OPENED[over](path(key))), keys, seed=True
        )
    for backend in backends:
        sides[f"ours, {backend}"] = one_by_one(lambda key, own=sets[backend]: own[key], keys)
    for backend in backends:
        sides[f"ours, {backend}, 3 repeats"] = one_by_one(
            lambda key, own=sets[backend]: own.__getitems__([(*key[:2], repeat) for repeat in range(3)]),
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
        found[f"torchvision's reference over {over}"] = DataLoader(dataset, shuffle=True, drop_last=True, **common)
    settings = dict(batch_size=batch, num_workers=workers)
    for backend in backends:
        found[f"ours, {backend}, as the workers hand on"] = loader = ours(root, backend, **settings).train_dataloader()
        loader.finish = None
    found[f"ours, {backends[0]}, finished on this CPU"] = ours(root, backends[0], **settings).train_dataloader()
    found[f"ours, {backends[0]}, 3 repeats"] = loader = ours(root, backends[0], 3, **settings).train_dataloader()
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


def measure_loader(root: Path, backends: list[str], rounds: int, batch: int, workers: int) -> list[Row]:
    sides = loaders(root, backends, batch, workers)
    return race({name: one_pass(loader, batch, workers) for name, loader in sides.items()}, rounds)


def measure_shards(
    root: Path, backend: str, rounds: int, turns: int, batch: int, workers: int, chunk: int
) -> dict[str, list[Row]]:
    """The same loader on a folder, on its shards, and on the shards in a bucket, with the requests for an image."""
    with tempfile.TemporaryDirectory() as folder, loopback.server() as requests:
        out = Path(folder) / "shards"
        cait_main(["shards", str(root), str(out), f"--images={chunk}"])
        address = loopback.upload(out, "shards")
        sizes = [path.stat().st_size for path in out.glob("train/chunk-*")]
        little, much = 8 * max(sizes) / 1e9, 2 * sum(sizes) / 1e9
        asked: dict[str, float] = {}

        def turn(name: str, place: Path | str, **settings: Any) -> Turn:
            cache = Path(folder) / name
            settings |= dict(batch_size=batch, num_workers=workers, data_dir=str(cache))
            loader = ours(place, backend, **settings).train_dataloader()
            loader.finish = None
            run = one_pass(loader, batch, workers)

            def emptied(number: int) -> float:
                for path in cache.rglob("chunk-*"):
                    path.unlink()
                requests.paths.clear()
                seconds = run(number)
                asked[name] = requests.of("/chunk-") / (len(loader) * batch)
                return seconds

            return emptied

        from_folder = turn("from the folder", root)
        pair = {"from the folder": from_folder, "from shards on this disk": turn("from shards on this disk", out)}
        caches: dict[str, dict[str, Any]] = {
            "windowed order": dict(order="windowed", window=4, cache_gb=little),
            "published order, room for all": dict(cache_gb=much),
            "published order": dict(cache_gb=little),
        }
        streams = {"from the folder": from_folder} | {
            name: turn(name, address, **settings) for name, settings in caches.items()
        }
        found = {"shards": race(pair, rounds, turns), "s3": race(streams, rounds)}
        found["s3"] = [row | {"requests": asked[row["side"]]} for row in found["s3"]]
        return found


class Side:
    """A process of `input_sides.py`, which makes one pass over its images when it is told to."""

    def __init__(self, side: str, root: Path, batch: int, workers: int, alone: bool, source: Path) -> None:
        script = Path(__file__).with_name("input_sides.py")
        command = [sys.executable, str(script), side, str(root), f"--batch={batch}", f"--workers={workers}"]
        self.walls: list[float] = []
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        pipes["env"] = os.environ | {"PYTHONPATH": str(source / "src")}
        self.process = subprocess.Popen([*command, *(["--alone"] if alone else [])], **pipes)
        assert self.process.stdout
        self.works = self.process.stdout.readline() == "ready\n"

    def __call__(self, turn: int) -> float:
        """Processor seconds an image."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        images, wall, spent = json.loads(self.process.stdout.readline())
        self.walls.append(wall / images)
        return spent / images

    def reason(self) -> str:
        """The last line that it wrote before it failed."""
        self.errors.seek(0)
        return ([line.strip() for line in self.errors if line.strip()] or ["no message"])[-1]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure_tree(
    root: Path, rounds: int, batch: int, workers: int, chunk: int, against: Path | None
) -> tuple[dict[str, list[Row]], dict[str, float], list[str]]:
    """The rows of `WAYS`, and "ours" of another checkout; kilobytes an image by kind of shards; what could not run."""
    found, sizes, missing = {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        roots = {"folder": root} | {name: Path(folder) / name for name in SHARDS_OF}
        images = len(list(root.glob("train/*/*")))
        for name, how in SHARDS_OF.items():
            cait_main(["shards", str(root), str(roots[name]), f"--images={chunk}", *how])
            sizes[name] = sum(path.stat().st_size for path in roots[name].glob("train/chunk-*")) / images / 1e3
        for level, ways in WAYS.items():
            sides = {}
            listed = [(name, *way, REPO) for name, way in ways.items()]
            listed += [(f"ours at {commit(against)}", "ours", "folder", against)] if against else []
            with ExitStack() as stack:
                for name, kind, reads, source in listed:
                    side = Side(kind, roots[reads], batch, workers, level == "alone", source)
                    stack.callback(side.end)
                    if side.works:
                        sides[name] = side
                    else:
                        missing.append(f"Left out {name}: {side.reason()}")
                rows = race(dict(sides), rounds)
            found[level] = [row | {"wall": statistics.median(sides[row["side"]].walls)} for row in rows]
    return found, sizes, missing


def endure(root: Path, backend: str, batches: int, batch: int, workers: int) -> str:
    """Draw so many batches from a backend's loader; any exception ends the script."""
    loader = ours(root, backend, batch_size=batch, num_workers=workers).train_dataloader()
    begin, left = time.perf_counter(), batches
    while left:
        left -= sum(1 for _ in islice(loader, left))
    took = time.perf_counter() - begin
    return (
        f"{backend}: {batches:,} batches of {batch} under Pillow {PIL.__version__} without an exception, {took:.0f} s"
    )


def available() -> tuple[list[str], list[str]]:
    """(the backends that work here, a line for each that does not)"""
    found, missing = [], []
    for backend in BACKENDS:
        try:
            if backend != "timm":
                decode.choose(backend)
            found.append(backend)
        except UserError as error:
            missing.append(f"Left out: {error}.")
    return found, missing


def versions() -> str:
    try:
        codec = decode.nvimgcodec(os.getpid())[0].__version__
    except (ImportError, RuntimeError):
        codec = "none"
    return (
        f"Python {platform.python_version()}, Pillow {PIL.__version__}, torchvision {torchvision.__version__}, "
        f"timm {timm.__version__}, nvImageCodec {codec}"
    )


def table(level: str, rows: list[Row]) -> list[str]:
    if level == "operations":
        lines = ["| | Pillow, µs | ours, µs | mean difference | largest difference |", "|---|---|---|---|---|"]
        for row in rows:
            times = " | ".join(f"{1e6 * row[side]:.0f}" for side in ("pillow", "ours"))
            lines.append(f"| {row['operation']} | {times} | {row['mean']:.4f} | {row['largest']} |")
        return lines
    if level in WAYS:
        lines = ["| | processor, ms an image | ratio | wall, ms an image |", "|---|---|---|---|"]
        for row in rows:
            name, spent, wall = row["side"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['wall']:.2f}"
            lines.append(f"| {name} | {spent} | **{row['ratio']:.2f}×** | {wall} |")
        return lines
    rate, differs, asks = level in ("loader", "shards", "s3"), "difference" in rows[0], "requests" in rows[0]
    heads = ["", "images a second" if rate else "ms an image", "ratio", *(["difference"] if differs else [])]
    heads += ["requests an image"] if asks else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        number = f"{1 / row['seconds']:.0f}" if rate else f"{1e3 * row['seconds']:.2f}"
        more = [f"{row['difference']:.3f}"] if differs else [f"{row['requests']:.4f}"] if asks else []
        lines.append(f"| {' | '.join([row['side'], number, '**{:.2f}×**'.format(row['ratio']), *more])} |")
    return lines


def main(arguments: list[str] | None = None) -> dict[str, list[Row]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="*", choices=CHOICES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=600)
    parser.add_argument("--turns", type=int, default=5, help=f"of {A_TURN} images (or passes over shards) in a round")
    parser.add_argument("--pass-batches", type=int, default=10, help="batches of a loader's round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=0, help="to draw from the loader of each of --backends")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="for --batches; by default all")
    parser.add_argument("--against", type=Path, help="another checkout of this project, as one more side of tree")
    parser.add_argument("--quick", action="store_true", help="as small as it can be, only to see that it runs")
    parser.add_argument("--out", type=Path, help="folder for a Markdown and a JSON file")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    levels = CHOICES[:-1] if options.levels is None else options.levels  # the rivals are an extra
    batch, chunk = 128, 64
    if options.quick:
        options.rounds, options.files, options.turns, options.pass_batches, batch, chunk = 1, 8, 1, 6, 4, 2
    backends, missing = available()
    found: dict[str, list[Row]] = {}
    kilobytes: dict[str, float] = {}
    endured = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        entries = max(options.files, options.pass_batches * batch)
        size = prepare(root, options.files, entries)
        made = f"{options.files} files of {size:.0f} KB on average, and links to them, {entries} in all"
        print(stamp(), versions(), made, *missing, sep="\n", flush=True)

        def show(level: str, rows: list[Row]) -> None:
            found[level] = rows
            print("", *table(level, rows), sep="\n", flush=True)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        if "decode" in levels:
            for level, rows in measure_decode(root, backends, options.rounds, options.turns).items():
                show(level, rows)
        if "operations" in levels:
            show("operations", measure_operations(options.rounds, options.turns))
        if "transform" in levels:
            show("transform", measure_transform(root, backends, options.rounds, options.turns))
        torch.set_num_threads(threads)
        if "loader" in levels:
            show("loader", measure_loader(root, backends, options.rounds, batch, options.workers))
        if "shards" in levels:
            how = (options.rounds, options.turns, batch, options.workers, chunk)
            for level, rows in measure_shards(root, backends[0], *how).items():
                show(level, rows)
        if "tree" in levels:
            rows_of, kilobytes, left_out = measure_tree(
                root, options.rounds, batch, options.workers, chunk, options.against
            )
            missing += left_out
            sizes = ", ".join(f"{name} {each:.0f}" for name, each in kilobytes.items())
            missing.append(f"Kilobytes an image in shards: {sizes}.")
            print(*left_out, missing[-1], sep="\n")
            for level, rows in rows_of.items():
                show(level, rows)
        if options.batches:
            for backend in options.backends or backends:
                endured.append(endure(root, backend, options.batches, batch, options.workers))
                print(endured[-1], flush=True)
    if options.out:
        words = ("FOLDER" if word == str(options.out) else word for word in given)
        command = " ".join(["python benchmarks/input.py", *words])
        record = dict(versions=versions(), command=command, kilobytes_a_file=size, kilobytes=kilobytes, missing=missing)
        record |= dict(levels=found, endured=endured)
        lines = ["# The input pipeline, ours beside its rivals", "", f"{stamp()}; {versions()}", "", f"`{command}`", ""]
        lines += [f"{made}. The ratio is the median of the rounds', above 1 where a side is faster.", ""]
        lines += [*missing, *NOTES]
        for level, rows in found.items():
            lines += ["", f"## {LEVELS[level].format(workers=options.workers, batch=batch)}", "", *table(level, rows)]
            if level in WAYS:
                lines += ["", *TREE]
            if level == "s3":
                lines += ["", *(line.format(chunks=-(-entries // chunk)) for line in SHARDS)]
        lines += ["", *(f"- {line}" for line in endured)] if endured else []
        write(options.out, file_name("input", "-".join(options.levels or [])), record, lines)
    return found


if __name__ == "__main__":
    main()
