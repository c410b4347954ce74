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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from cait import disk
from cait.cli import loading
from cait.cli.options import Options, run_missing
from cait.errors import UserError, printable
from cait.run.program import Program

WIDEST = 48
"""Letters of a name in the table; a longer name shows only its end."""


class Row(NamedTuple):
    """The result for an image: its most probable classes, or why it cannot be read."""

    path: str
    best: list[dict[str, Any]]
    error: str | None


def predict(arguments: list[str], program: Program) -> None:
    """Write the classes and probabilities of images."""
    given = _options(arguments)
    if given.output and given.output.exists():
        raise UserError(f"{given.output} exists; move it away or name another file with --output")
    checkpoint, folder = loading.checkpoint_of(given.run, "predict with")
    samples = _samples(given.images)
    from cait.guards import trust

    with contextlib.nullcontext() if given.trusted else trust.only_own(folder):
        loaded = loading.from_checkpoint(
            checkpoint, folder, False if given.raw else None, None, program.module, program.data
        )
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
            yield Row(samples.name(index), [] if error else classes, error)
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
    total, count, unreadable, reported = len(samples), 0, 0, 0.0
    start = time.monotonic()
    moving = sys.stderr.isatty() and (given.output is not None or not sys.stdout.isatty())
    clear = "\r\033[K" if moving else ""
    with _file(given.output) as file:
        write = FORMATS[given.format](file, samples, class_names, given.top_k)
        for count, row in enumerate(rows, 1):
            write(row)
            if row.error:
                unreadable += 1
                print(f"{clear}cannot read {printable(row.path)}: {row.error}", file=sys.stderr)
            elif moving and time.monotonic() - reported > 0.2:
                reported = time.monotonic()
                print(f"{clear}{count:,} of {total:,} images", end="", file=sys.stderr, flush=True)
    end = f", {unreadable:,} unreadable" if unreadable else ""
    print(f"{clear}{count:,} image{'s' * (count != 1)} in {time.monotonic() - start:.1f} s{end}", file=sys.stderr)
    if given.output:
        print(os.path.relpath(given.output))
    return count - unreadable


@contextlib.contextmanager
def _file(output: Path | None) -> Iterator[IO[str]]:
    """The file to write, which appears once complete, or standard output. Names may hold bytes that are not text."""
    if output is None:
        yield sys.stdout
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(output) as beside, beside.open("w", **disk.TABLE) as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error


Write = Callable[[Row], None]


def _table(file: IO[str], samples: Any, class_names: list[str], top_k: int) -> Write:
    """Rows as they come, in columns that fit a terminal."""
    width = min(max(len(samples.name(index)) for index in range(len(samples))), WIDEST)
    label = min(max(map(len, class_names)), WIDEST // 2)
    columns = shutil.get_terminal_size().columns if file.isatty() else None

    def write(row: Row) -> None:
        path = printable(row.path)
        path = path if len(path) <= width else f"…{path[1 - width :]}"
        if row.error:
            line = f"{path:<{width}}  unreadable"
        else:
            first, *others = row.best
            more = ", ".join(f"{other['class']} {other['probability']:.1%}" for other in others)
            line = f"{path:<{width}}  {first['class']:<{label}} {first['probability']:6.1%}  {more}".rstrip()
        if columns and len(line) > columns:
            line = f"{line[: columns - 1]}…"
        print(line, file=file)

    return write


def _csv(file: IO[str], samples: Any, class_names: list[str], top_k: int) -> Write:
    """path, class, probability, class_2, probability_2, ..., error"""
    places = range(1, min(top_k, len(class_names)) + 1)
    ends = ["" if place == 1 else f"_{place}" for place in places]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["path", *(f"{name}{end}" for end in ends for name in ("class", "probability")), "error"])

    def write(row: Row) -> None:
        cells = [cell for best in row.best for cell in (best["class"], f"{best['probability']:.4f}")]
        writer.writerow([row.path, *(cells or [""] * 2 * len(places)), row.error or ""])

    return write


def _jsonl(file: IO[str], samples: Any, class_names: list[str], top_k: int) -> Write:
    """A line for each image, as docs/predict.schema.json says."""

    def write(row: Row) -> None:
        result = {"error": row.error} if row.error else {"predictions": row.best}
        print(json.dumps({"path": row.path, **result}), file=file)

    return write


FORMATS = {"table": _table, "csv": _csv, "jsonl": _jsonl}
