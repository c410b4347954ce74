# mypy: ignore-errors
"""Random access by index in shards: ours beside LitData's and MosaicML Streaming's, in one run, interleaved.

    python contrib/shards/compare.py [--images 4096] [--in_chunk 128] [--rounds 7] [--s3]

Blobs of about 105 KB, as an image of ImageNet, in a seeded random order. No side decodes. Sides whose package is
missing are left out. --s3 reads from moto's server in a process of its own, with room for all chunks.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "benchmarks")]

import numpy as np  # noqa: E402
from report import stamp  # noqa: E402

KEYS = {"AWS_ACCESS_KEY_ID": "loopback", "AWS_SECRET_ACCESS_KEY": "loopback", "AWS_DEFAULT_REGION": "us-east-1"}
Get = Callable[[int], bytes]


class Blobs:
    """Bytes of a size around 105 KB by index, with labels, as a set of `cait.data.dataset.Samples`."""

    def __init__(self, count: int) -> None:
        self.count, self.noise = count, np.random.default_rng(0).bytes(1 << 20)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"blobs/{index}"

    def blob(self, index: int) -> bytes:
        rng = random.Random(index)
        start = rng.randrange(1 << 19)
        return self.noise[start : start + rng.randrange(60_000, 150_000)]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from io import BytesIO

        return BytesIO(self.blob(index)), index % 10


def write(place: Path, images: int, in_chunk: int) -> None:
    from contrib.shards import writer

    class Source:
        train, val, class_names = Blobs(images), Blobs(10), [str(number) for number in range(10)]

    for _ in writer.make(Source(), "blobs", {"train": "train", "val": "val"}, place / "ours", in_chunk, 0):
        pass
    try:
        from streaming import MDSWriter
    except ImportError:
        return
    blobs = Blobs(images)
    with MDSWriter(
        out=str(place / "mds"), columns={"image": "bytes", "label": "int"}, size_limit=in_chunk * 105_000
    ) as out:
        for index in range(images):
            out.write({"image": blobs.blob(index), "label": index % 10})


def ours(root: str, cache: Path) -> Get:
    from cait.data.folder import Splits
    from contrib.shards import Shards
    from contrib.shards.source import ShardSource

    samples = ShardSource(Splits(root), Shards(data_dir=str(cache), cache_gb=50)).train
    return lambda index: samples[index][0].getvalue()


def litdata(root: str, cache: Path) -> Get:
    from litdata import StreamingDataset

    cache.mkdir(exist_ok=True)
    data = StreamingDataset(f"{root}/train", cache_dir=str(cache) if "://" in root else None, max_cache_size="50GB")
    return lambda index: data[index][0]


def litdata_mapped(root: str, cache: Path) -> Get:
    """Its reader, all chunks mapped into memory, by what its data set calls inside where it reads in order."""
    from litdata.streaming.item_loader import PyTreeLoader
    from litdata.streaming.reader import BinaryReader
    from litdata.streaming.sampler import ChunkedIndex

    cache.mkdir(exist_ok=True)
    where = (
        dict(cache_dir=str(cache), remote_input_dir=f"{root}/train")
        if "://" in root
        else dict(cache_dir=f"{root}/train")
    )
    reader = BinaryReader(**where, item_loader=PyTreeLoader(batch_decode=0))
    chunks = [*range(len(reader.get_chunk_intervals()))]
    reader.enable_posix_fast(chunks, keep=len(chunks), prefetch=False)
    places = [reader._get_chunk_index_from_index(index) for index in range(reader.get_length())]
    return lambda index: reader.read(ChunkedIndex(*places[index]))[0]


def mosaic(root: str, cache: Path) -> Get:
    from streaming import StreamingDataset

    where = dict(remote=root, local=str(cache)) if "://" in root else dict(local=root)
    data = StreamingDataset(**where, batch_size=1, shuffle=False)
    return lambda index: data[index]["image"]


def speeds(sides: dict[str, Get], images: int, rounds: int, most: float = 2.0) -> dict[str, list[float]]:
    """Images a second of each side in each round; a turn takes `most` seconds or 400 images."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        order = np.random.default_rng(turn).permutation(images)[:400].tolist()
        for name in sides if turn % 2 else reversed(sides):
            begin, count = time.perf_counter(), 0
            for index in order:
                assert len(sides[name](index)) > 50_000
                count += 1
                if time.perf_counter() - begin > most:
                    break
            found[name].append(count / (time.perf_counter() - begin))
    return found


def show(title: str, found: dict[str, list[float]]) -> None:
    first = found["ours"]
    print(f"\n{title}\n\n| reads by | images a second | ratio |\n|---|---|---|")
    for name, each in found.items():
        ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
        print(f"| {name} | {statistics.median(each):,.0f} | {ratio:.3f} |")


def s3(place: Path) -> subprocess.Popen[bytes]:
    """moto's server with the shards in it."""
    port = 5999
    try:
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # it has no setting for that
    except ImportError:
        pass
    os.environ.update(
        KEYS,
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        S3_ENDPOINT_URL=f"http://127.0.0.1:{port}",
    )
    code = (
        "from werkzeug.serving import WSGIRequestHandler as H; H.disable_nagle_algorithm = True\n"
        f"from moto.server import main; main(['-p{port}', '-H127.0.0.1'])"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    import boto3

    client = boto3.client("s3")
    for _ in range(100):
        try:
            client.create_bucket(Bucket="pictures")
            break
        except Exception:
            time.sleep(0.2)
    for path in place.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "pictures", str(path.relative_to(place)))
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--in_chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--s3", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write(place / "made", asked.images, asked.in_chunk)
        made = place / "made"
        makers = {"ours": ours, "LitData, `StreamingDataset[i]`": litdata}
        makers["LitData, its reader with all chunks mapped"] = litdata_mapped
        if (made / "mds").exists():
            makers["MosaicML, `StreamingDataset[i]`"] = mosaic
        server = s3(made) if asked.s3 else None
        try:
            root = "s3://pictures" if server else str(made)
            sides = {
                name: make(f"{root}/{'mds' if make is mosaic else 'ours'}", place / make.__name__)
                for name, make in makers.items()
            }
            where = "moto's server on the same cores, room for all chunks" if server else "a folder"
            print(f"{stamp()}; numpy {np.__version__}; {asked.images:,} blobs, {asked.in_chunk} in a chunk")
            if server:
                show(f"From {where}, cache empty at first", speeds(sides, asked.images, 1, most=30))
            show(f"From {where}", speeds(sides, asked.images, asked.rounds))
        finally:
            if server:
                server.kill()


if __name__ == "__main__":
    main()
