"""`cait predict`: classes and probabilities of images, as a table, CSV or JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import csv
import glob
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress

from cait import disk
from cait.cli import loading
from cait.cli.options import Options, run_missing
from cait.errors import UserError, printable
from cait.run.program import Program

WIDEST = 48
"""Letters of a name in the table; a longer name shows only its end."""
Row = dict[str, Any]
"""The result for an image, as docs/predict.schema.json says: "path", and "predictions" or "error"."""


def predict(arguments: list[str], program: Program) -> None:
    """Write the classes and probabilities of images."""
    given = _options(arguments)
    if given.output and given.output.exists():
        raise UserError(f"{given.output} exists; move it away or name another file with --output")
    checkpoint, folder = loading.checkpoint_of(given.run, "predict with")
    samples = _samples(given.images)
    from cait.guards import trust

    with trust.only_own(folder, given.trusted):
        ema = False if given.raw else None
        loaded = loading.from_checkpoint(checkpoint, folder, ema, None, program.module, program.data)
        rows = _rows(loaded, samples, loading.device(folder), given.top_k)
        if not _write(rows, samples, loaded.class_names, given):
            raise UserError(f"none of the {len(samples):,} images can be read")


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("predict", "Classify images with the best checkpoint of a run.")
    options.epilog = "Unreadable images get a row with the error and do not stop the others."
    options.add_argument("run", metavar="RUN", nargs="?", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument(
        "images", metavar="IMAGE", nargs="*", help='files, folders, patterns such as "*.jpg", or - for names on stdin'
    )
    options.add_argument("--format", choices=FORMATS, default="table", help="default table")
    options.add_argument("--top_k", type=int, default=5, metavar="K", help="classes of each image; default 5")
    options.add_argument("--output", type=Path, metavar="FILE", help="default: the screen")
    options.add_argument("--raw", action="store_true", help="the raw weights, also if there is a moving average")
    options.add_trust()
    given = options.parse_intermixed_args(arguments)
    if given.run is None:
        raise run_missing("predict")
    if not given.images:
        raise UserError(f"which images? `cait predict {given.run} FILE|DIR ...`, or - for names on standard input")
    if given.top_k < 1:
        raise UserError(f"--top_k must be at least 1, got {given.top_k}")
    return given


def _samples(places: list[str]) -> Any:
    """The images of files, folders and patterns, in their order.

    Raises:
        UserError: a pattern matches nothing, a folder holds no image, or there is no image at all.
    """
    from cait.data.listing import Files

    samples = Files((path, -1) for place in places for path in _paths(place))
    if not len(samples):
        raise UserError("no names on standard input")
    return samples


def _paths(place: str) -> Iterable[str]:
    from cait.data.folder import scan_flat

    if place == "-":
        return filter(None, os.fsdecode(sys.stdin.buffer.read()).replace("\r\n", "\n").split("\n"))
    if os.path.isdir(place):
        return (path for path, _ in scan_flat(Path(place)))
    if os.path.lexists(place) or not glob.has_magic(place):
        return [place]  # a missing file gets a row too
    matches = sorted(glob.glob(place, recursive=True))
    if not matches:
        raise UserError(f"nothing matches {place}")
    paths = [path for match in matches for path in (_paths(match) if os.path.isdir(match) else [match])]
    return list(dict.fromkeys(paths))  # ** matches a folder and what lies in it


def _rows(loaded: loading.Loaded, samples: Any, device: Any, top_k: int) -> Iterator[Row]:
    """A row for each image, in order."""
    import torch

    from cait.train.prediction import best_classes

    data, network = loaded.data, loaded.network.to(device)
    data.num_workers = min(data.workers(1), len(samples) // data.eval_batch_size)  # a few images need no workers
    data.predict_samples = samples
    done = 0
    for images, labels in data.predict_dataloader():
        with torch.inference_mode():
            probabilities = network(images.to(device)).float().softmax(dim=1).cpu()
        best = best_classes(probabilities, loaded.class_names, top_k)
        for index, (classes, label) in enumerate(zip(best, labels.tolist(), strict=True), done):
            error = _why_unreadable(samples, index) if label < 0 else None
            if not error and not probabilities[index - done].isfinite().all():
                raise UserError(f"the network has no finite probabilities for {samples.name(index)}")
            yield {"path": samples.name(index)} | ({"error": error} if error else {"predictions": classes})
        done += len(best)


def _why_unreadable(samples: Any, index: int) -> str:
    """Why an image cannot be read. Loader processes tell only that it cannot, so read it once more."""
    from cait.data.reading import UnreadableImageError, load_rgb

    name = samples.name(index)
    try:
        load_rgb(samples[index][0], name)
    except UnreadableImageError as error:
        return str(error).removeprefix(f"cannot read the image {name}: ")
    return "it could not be read at first"


def _write(rows: Iterator[Row], samples: Any, class_names: list[str], given: argparse.Namespace) -> int:
    """Write the rows to the file or to the screen; returns how many images could be read."""
    start, console = time.monotonic(), Console(stderr=True)
    moving = console.is_terminal and (given.output is not None or not sys.stdout.isatty())
    readable: list[bool] = []
    with (
        Progress(console=console, transient=True, redirect_stdout=False, disable=not moving) as progress,
        _file(given.output) as file,
    ):
        told = _tell(progress.track(rows, len(samples), description="images"), readable)
        FORMATS[given.format](file, told, samples, class_names, given.top_k)
    count = len(readable)
    end = "" if all(readable) else f", {readable.count(False):,} unreadable"
    print(f"{count:,} image{'s' * (count != 1)} in {time.monotonic() - start:.1f} s{end}", file=sys.stderr)
    if given.output:
        print(os.path.relpath(given.output))
    return readable.count(True)


def _tell(rows: Iterable[Row], readable: list[bool]) -> Iterator[Row]:
    """The rows, after those that are unreadable were reported, and `readable` was extended."""
    for row in rows:
        readable.append("error" not in row)
        if "error" in row:
            print(f"cannot read {printable(row['path'])}: {row['error']}", file=sys.stderr)
        yield row


@contextlib.contextmanager
def _file(output: Path | None) -> Iterator[IO[str]]:
    """The file to write, which appears once complete, or standard output. Names may hold bytes that are not text."""
    if output is None:
        yield sys.stdout
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(output) as beside, beside.open("w", **disk.TABLE) as file:
        yield file


def _table(file: IO[str], rows: Iterable[Row], samples: Any, class_names: list[str], top_k: int) -> None:
    """Rows as they come, in columns that fit a terminal."""
    width = min(max(len(samples.name(index)) for index in range(len(samples))), WIDEST)
    label = min(max(map(len, class_names)), WIDEST // 2)
    columns = shutil.get_terminal_size().columns if file.isatty() else None
    for row in rows:
        path = printable(row["path"])
        path = path if len(path) <= width else f"…{path[1 - width :]}"
        if "error" in row:
            line = f"{path:<{width}}  unreadable"
        else:
            first, *others = row["predictions"]
            more = ", ".join(f"{other['class']} {other['probability']:.1%}" for other in others)
            line = f"{path:<{width}}  {first['class']:<{label}} {first['probability']:6.1%}  {more}".rstrip()
        if columns and len(line) > columns:
            line = f"{line[: columns - 1]}…"
        print(line, file=file)


def _csv(file: IO[str], rows: Iterable[Row], samples: Any, class_names: list[str], top_k: int) -> None:
    """path, class, probability, class_2, probability_2, ..., error"""
    places = range(1, min(top_k, len(class_names)) + 1)
    ends = ["" if place == 1 else f"_{place}" for place in places]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["path", *(f"{name}{end}" for end in ends for name in ("class", "probability")), "error"])
    for row in rows:
        cells = [cell for best in row.get("predictions", ()) for cell in (best["class"], f"{best['probability']:.4f}")]
        writer.writerow([row["path"], *(cells or [""] * 2 * len(places)), row.get("error", "")])


def _jsonl(file: IO[str], rows: Iterable[Row], samples: Any, class_names: list[str], top_k: int) -> None:
    for row in rows:
        print(json.dumps(row), file=file)


FORMATS = {"table": _table, "csv": _csv, "jsonl": _jsonl}
