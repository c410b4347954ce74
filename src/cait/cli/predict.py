"""`cait predict`: classes and probabilities of images, as a table, CSV or JSON lines."""

import argparse
import contextlib
import csv
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress

from cait import disk
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import CONTROL, UserError, console, printable, tell
from cait.guards import trust
from cait.run.program import Program

WIDEST = 48
"""Letters of a name in the table; a longer name shows only its end."""
Row = dict[str, Any]
"""The result for an image, as docs/predict.schema.json says: "path", and "predictions" or "error"."""
Rows = Iterable[Row]


def predict(arguments: list[str], program: Program) -> None:
    """Write the classes and probabilities of images."""
    given = _options(arguments)
    if given.output:
        disk.check_output(given.output, is_new=True)
    checkpoint, folder = loading.checkpoint_of(given.run, "predict with")
    paths = [path for place in given.images for path in _paths(place)]
    if not paths:
        raise UserError("no names on standard input")
    with trust.only_own(given.trusted):
        loaded = loading.from_checkpoint(checkpoint, folder, given.ema, None, program.module, program.data)
        _write(loaded, paths, given)


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("predict", "Classify images with the best checkpoint of a run.")
    options.epilog = "Unreadable images get a row with the error and do not stop the others."
    options.add_argument("run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)")
    options.add_argument("images", metavar="IMAGE", nargs="+", help="files, folders, or - for names on standard input")
    options.add_argument("--format", choices=FORMATS, help="default: as --output ends, or table")
    most = "classes of each image; default 5, or all that seem right where images have several"
    options.add_argument("--top_k", type=int, metavar="K", help=most)
    options.add_argument("--output", type=Path, metavar="FILE", help="default: the screen")
    options.add_weights()
    options.add_trust()
    given = options.parse_intermixed_args(arguments)
    suffix = given.output.suffix[1:] if given.output else ""
    given.format = given.format or (suffix if suffix in FORMATS else "table")
    if given.top_k is not None and given.top_k < 1:
        raise UserError(f"--top_k must be at least 1, got {given.top_k}")
    return given


def _paths(place: str) -> Iterable[str]:
    """The images of a file, a folder or standard input, in their order. Raises UserError if a folder holds none."""
    from cait.data.folder import scan_flat

    if place == "-":
        return filter(None, os.fsdecode(sys.stdin.buffer.read()).lstrip("\ufeff").replace("\r\n", "\n").split("\n"))
    if os.path.isdir(place):
        return (path for path, _ in scan_flat(Path(place)))
    return [place]  # a missing file gets a row too


def _rows(loaded: loading.Loaded, paths: list[str], top_k: int | None, unreadable: list[str]) -> Iterator[Row]:
    """A row for each image, in order. Those that are unreadable are reported, and added to the list."""
    from cait.data.listing import Files

    data, remaining = loaded.data, iter(paths)
    data.num_workers = min(data.workers(1), len(paths) // data.eval_batch_size)  # a few images need no workers
    for probabilities, labels in loaded.judge(Files((path, 0) for path in paths)):
        finite = probabilities.isfinite().all(dim=1)
        best = iter(loaded.task.best(probabilities[finite], loaded.class_names, top_k))
        for label, is_finite in zip(labels.tolist(), finite.tolist(), strict=True):
            path, classes = next(remaining), next(best) if is_finite else None
            if label < 0:
                error = _why_unreadable(path, data.settings)
                unreadable.append(path)
                tell(f"cannot read {path}: {error}")
                yield {"path": path, "error": error}
            elif is_finite:
                yield {"path": path, "predictions": classes}
            else:
                raise UserError(f"the network has no finite probabilities for {path}")


def _why_unreadable(path: str, reading: Any) -> str:
    """Why an image cannot be read. Loader processes tell only that it cannot, so read it once more."""
    from cait.data.reading import UnreadableImageError, load_image

    try:
        load_image(path, reading=reading)
    except UnreadableImageError as error:
        return str(error).removeprefix(f"cannot read the image {path}: ")
    return "it could not be read at first"


def _write(loaded: loading.Loaded, paths: list[str], given: argparse.Namespace) -> None:
    start, screen, unreadable = time.monotonic(), console(stderr=True), list[str]()
    is_shown = screen.is_terminal and (given.output is not None or not sys.stdout.isatty())
    rows = _rows(loaded, paths, given.top_k, unreadable)
    # Without a thread of its own, which might hold a lock that the loader's processes need when they are forked.
    bar = Progress(console=screen, transient=True, redirect_stdout=False, disable=not is_shown, auto_refresh=False)
    with bar, _file(given.output) as file:
        shown = bar.track(rows, len(paths), description="images")
        FORMATS[given.format](file, shown, paths, loaded, given.top_k)
    noun = "image" if len(paths) == 1 else "images"
    end = f", {len(unreadable):,} unreadable" if unreadable else ""
    print(f"{len(paths):,} {noun} in {time.monotonic() - start:.1f} s{end}", file=sys.stderr)
    if given.output:
        print(given.output)
    if len(unreadable) == len(paths):
        raise UserError(f"none of the {len(paths):,} images can be read")


@contextlib.contextmanager
def _file(output: Path | None) -> Iterator[IO[str]]:
    """The file to write, which appears once complete, or standard output. Names may hold bytes that are not text."""
    if output is None:
        yield sys.stdout
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with disk.atomic_write(output) as beside, beside.open("w", **disk.TABLE) as file:
        yield file


def _table(file: IO[str], rows: Rows, paths: list[str], loaded: loading.Loaded, top_k: int | None) -> None:
    """Rows as they come, in columns."""
    width = min(max(map(len, paths)), WIDEST)
    label = min(max(map(len, loaded.class_names)), WIDEST // 2)
    for row in rows:
        path = printable(row["path"])
        path = path if len(path) <= width else f"…{path[1 - width :]}"
        if "error" in row:
            line = "unreadable"
        elif not row["predictions"]:
            line = "no class"
        else:
            first, *others = row["predictions"]
            more = ", ".join(f"{other['class']} {other['probability']:.1%}" for other in others)
            line = f"{first['class']:<{label}} {first['probability']:6.1%}  {more}".rstrip()
        print(f"{path:<{width}}  {line}", file=file)


def _csv(file: IO[str], rows: Rows, paths: list[str], loaded: loading.Loaded, top_k: int | None) -> None:
    """path, class, probability, class_2, probability_2, ..., error; with several labels per image one cell for all."""
    several = loaded.task.several
    places = 1 if several else min(top_k or 5, len(loaded.class_names))
    ends = ["", *(f"_{place}" for place in range(2, places + 1))]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["path", *(f"{name}{end}" for end in ends for name in ("class", "probability")), "error"])
    for row in rows:
        best = [(one["class"], f"{one['probability']:.4f}") for one in row.get("predictions", ())]
        if several and "error" not in row:  # as in a table of labels; without a class ";" stands alone
            best = [(";".join(name for name, _ in best) or ";", ";".join(share for _, share in best))]
        path = row["path"] if file is not sys.stdout else CONTROL.sub("\N{REPLACEMENT CHARACTER}", row["path"])
        found = [*itertools.chain(*best)] or [""] * 2 * places
        writer.writerow([path, *found, row.get("error", "")])


def _jsonl(file: IO[str], rows: Rows, paths: list[str], loaded: loading.Loaded, top_k: int | None) -> None:
    for row in rows:
        print(json.dumps(row), file=file)


FORMATS: dict[str, Callable[..., None]] = {"table": _table, "csv": _csv, "jsonl": _jsonl}
