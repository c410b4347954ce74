"""One side of the race of `benchmarks/input.py --levels tree`: a process that makes batches when it is told to.

    python benchmarks/input_sides.py SIDE FOLDER --batch 128 --workers 2

It prints "ready" once its first pass is over. For each line on its standard input it makes one pass over the images of
FOLDER/train and prints the images, the seconds, and the processor seconds of itself with all its workers. Batches are
uint8 [B, 224, 224, 3], or [B, 3, 224, 224] where a library has them so, as workers hand them on: nothing is normalised.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageDataset, create_loader
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, RandomResizedCrop, v2

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
Pass = Callable[[], int]
"""Makes all batches once and returns how many images there were."""


def counted(batches: Callable[[], Iterable[Any]]) -> Pass:
    return lambda: sum(len(batch[0]) for batch in batches())


def ours(root: Path, batch: int, workers: int, recipe: bool, **settings: Any) -> Pass:
    """This project's loader, as its workers hand on."""
    from cait.data.datamodule import ImageNetDataModule

    alone: dict[str, Any] = {} if recipe else dict(auto_augment=None, erase_prob=0.0)
    how: dict[str, Any] = dict(repeats=1, max_bad_share=0.0, batch_size=batch, num_workers=workers)
    data = ImageNetDataModule(str(root), **(how | alone | settings))
    data.setup()
    loader = data.train_dataloader()
    loader.finish = None
    return counted(lambda: loader)


def repeated(*given: Any) -> Pass:
    return ours(*given, repeats=3, decode_once=True)


def timms(root: Path, batch: int, workers: int, recipe: bool) -> Pass:
    """timm's loader, as its workers hand on to the prefetcher."""
    how = RECIPE if recipe else RECIPE | dict(auto_augment=None, re_prob=0.0)
    loading: dict[str, Any] = dict(batch_size=batch, num_workers=workers, persistent_workers=True, use_prefetcher=True)
    images = ImageDataset(str(root / "train"))
    made = create_loader(images, SIZE, is_training=True, device=torch.device("cpu"), **how, **loading)
    return counted(lambda: made.loader)


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


def torchvisions(root: Path, batch: int, workers: int, recipe: bool) -> Pass:
    from torchvision.datasets import ImageFolder

    bytes_alone = v2.Compose(torchvision_reference("tensor").transforms[: 3 if recipe else 2])
    images = ImageFolder(str(root / "train"), bytes_alone, loader=open_tensor)
    one = dict(worker_init_fn=_one_thread, persistent_workers=True, drop_last=True)
    loader = DataLoader(images, batch, shuffle=True, num_workers=workers, **one)  # type: ignore[arg-type]
    return counted(lambda: loader)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def dalis(root: Path, batch: int, workers: int, recipe: bool) -> Pass:
    """DALI on the CPU, its own RandAugment; it draws the crop before it decodes."""
    from nvidia import nvimgcodec

    ctypes.CDLL(str(Path(nvimgcodec.__file__).with_name("libnvimgcodec.so.0")), ctypes.RTLD_GLOBAL)  # DALI looks for it
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.auto_aug import rand_augment

    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None, enable_conditionals=True)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(root / "train"), random_shuffle=True, name="files")
        crop = dict(random_area=RECIPE["scale"], random_aspect_ratio=RECIPE["ratio"])
        images = fn.decoders.image_random_crop(files, **crop, device="cpu")
        cubic = types.DALIInterpType.INTERP_CUBIC
        images = fn.resize(images, size=(SIZE, SIZE), interp_type=cubic, antialias=True)
        images = fn.flip(images, horizontal=fn.random.coin_flip())
        if recipe:
            images = rand_augment.rand_augment(images, n=2, m=9, interp_type=types.DALIInterpType.INTERP_LINEAR)
        return images, labels

    built = pipeline()
    built.build()
    number = built.reader_meta("files")["epoch_size"] // batch

    def run() -> int:
        return sum(len(built.run()[0]) for _ in range(number))

    return run


def spdls(root: Path, batch: int, workers: int, recipe: bool) -> Pass:
    """SPDL's threads over FFmpeg: it decodes, crops, resizes and flips; torchvision's RandAugment on tensors."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    paths = sorted(map(str, (root / "train").glob("*/*.jpg")))
    policy = torchvision_reference("tensor").transforms[2] if recipe else None
    draw = random.Random(0)

    def load(path: str) -> torch.Tensor:
        with Image.open(path) as image:
            width, height = image.size
        meta = torch.empty(3, height, width, device="meta")
        top, left, rows, columns = RandomResizedCrop.get_params(meta, RECIPE["scale"], RECIPE["ratio"])
        flip = ",hflip" if draw.random() < 0.5 else ""
        crop = f"crop={columns}:{rows}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bicubic{flip},format=rgb24"
        pixels = spdl.io.to_torch(spdl.io.load_image(path, filter_desc=crop))
        return policy(pixels.permute(2, 0, 1)) if policy else pixels

    def run() -> int:
        shuffled = draw.sample(paths, len(paths) // batch * batch)
        made = PipelineBuilder().add_source(shuffled).pipe(load, concurrency=workers).aggregate(batch)
        built = made.pipe(torch.stack).add_sink(2).build(num_threads=workers)
        with built.auto_stop():
            found = sum(len(images) for images in built.get_iterator(timeout=60))
        assert found == len(shuffled), f"{found} of {len(shuffled)} images"
        return found

    return run


def ffcvs(root: Path, batch: int, workers: int, recipe: bool, mode: str) -> Pass:
    """FFCV: crop and flip alone, for it has no RandAugment; its crop is resized by OpenCV's area filter."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    assert not recipe
    file = root / f"{mode}.beton"
    if not file.exists():
        field = RGBImageField(write_mode=mode, jpeg_quality=95)
        writer = DatasetWriter(str(file), {"image": field, "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset(ImageFolder(str(root / "train")))
    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
    pipelines = {"image": [crop, RandomHorizontalFlip(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    how: dict[str, Any] = dict(order=OrderOption.RANDOM, drop_last=True, os_cache=True)
    loader = Loader(str(file), batch_size=batch, num_workers=workers, pipelines=pipelines, **how)
    return counted(lambda: loader)


def ffcvs_jpeg(*given: Any) -> Pass:
    return ffcvs(*given, mode="jpg")


def ffcvs_raw(*given: Any) -> Pass:
    return ffcvs(*given, mode="raw")


SIDES: dict[str, Callable[..., Pass]] = {
    "ours": ours,
    "repeated": repeated,
    "timm": timms,
    "torchvision": torchvisions,
    "dali": dalis,
    "spdl": spdls,
    "ffcv-jpeg": ffcvs_jpeg,
    "ffcv-raw": ffcvs_raw,
}


def spent() -> float:
    """Processor seconds of this process and of all below it, also of those that have ended."""
    times, children = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        process = int(path.parent.name)
        times[process] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(process)
    total, left = 0, [os.getpid()]
    while left:
        total += times[process := left.pop()]
        left += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("root", type=Path)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="crop and flip alone, without RandAugment")
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    out, sys.stdout = sys.stdout, sys.stderr
    make = SIDES[given.side](given.root, given.batch, given.workers, not given.alone)
    make()
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        begin, before = time.perf_counter(), spent()
        images = make()
        print(json.dumps([images, time.perf_counter() - begin, spent() - before]), file=out, flush=True)


if __name__ == "__main__":
    main()
