"""`cait predict`: classes and probabilities of images, as a table, CSV or JSON lines."""

import argparse
import contextlib
import csv
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress

from cait import disk
from cait.cli import loading
from cait.cli.options import Options
from cait.errors import CONTROL, UserError, console, printable, tell
from cait.run.program import Program

WIDEST = 48
"""Letters of a name in the table; a longer name shows only its end."""
Row = dict[str, Any]
"""The result for an image, as docs/predict.schema.json says: "path", and "predictions" or "error"."""
Rows = Iterable[Row]


def predict(arguments: list[str], program: Program) -> None:
    """Write the classes and probabilities of images."""
    asked = _options(arguments)
    if asked.output:
        disk.check_output(asked.output, is_new=True)
    checkpoint, folder = loading.checkpoint_of(asked.run, "predict with")
    paths = [path for source in asked.images for path in _paths(source)]
    if not paths:
        raise UserError("no names on standard input")
    loaded = loading.load_run(asked, checkpoint, folder, program, takes_network=False)
    _write(loaded, paths, asked)


def _options(arguments: list[str]) -> argparse.Namespace:
    options = Options("predict", "Classify images with the best checkpoint of a run.")
    options.epilog = "Unreadable images get a row with the error and do not stop the others."
    options.add_argument(
        "run", metavar="RUN", help="a run in logs/, its folder, or a checkpoint (.ckpt)"
    )
    options.add_argument(
        "images",
        metavar="IMAGE",
        nargs="+",
        help="files, folders, or - for names on standard input",
    )
    options.add_argument("--format", choices=FORMATS, help="default: as --output ends, or table")
    options.add_argument(
        "--top_k",
        type=int,
        metavar="K",
        help="classes of each image; default 5, or all that seem right where images have several",
    )
    options.add_argument("--output", type=Path, metavar="FILE", help="default: the screen")
    options.add_weights()
    asked = options.parse_intermixed_args(arguments)
    if asked.format is None:
        suffix = asked.output.suffix[1:] if asked.output else ""
        asked.format = suffix if suffix in FORMATS else "table"
    if asked.top_k is not None and asked.top_k < 1:
        raise UserError(f"--top_k must be at least 1, got {asked.top_k}")
    return asked


def _paths(source: str) -> Iterable[str]:
    """The images of a file, a folder or standard input, in their order. Raises UserError if a folder holds none."""
    from cait.data.folder import scan_flat

    if source == "-":
        text = os.fsdecode(sys.stdin.buffer.read()).lstrip("\ufeff")
        return filter(None, text.replace("\r\n", "\n").split("\n"))
    # a missing file gets a row too
    return dict(scan_flat(Path(source))) if os.path.isdir(source) else [source]


def _rows(
    loaded: loading.Loaded, paths: list[str], top_k: int | None, unreadable: list[str]
) -> Iterator[Row]:
    """A row for each image, in order. Those that are unreadable are reported, and added to the list."""
    from cait.data.table import Images

    data = loaded.data
    # a few images need no workers
    data.num_workers = min(data.workers(1), len(paths) // data.eval_batch_size)
    remaining = iter(paths)
    for probabilities, labels in loaded.judge(Images((path, 0) for path in paths)):
        finite = probabilities.isfinite().all(dim=1)
        predictions = loaded.task.best(probabilities.nan_to_num(), loaded.class_names, top_k)
        for label, is_finite, best in zip(
            labels.tolist(), finite.tolist(), predictions, strict=True
        ):
            path = next(remaining)
            if label < 0:
                error = _why_unreadable(path, data.settings)
                unreadable.append(path)
                tell(f"cannot read {path}: {error}")
                yield {"path": path, "error": error}
            elif is_finite:
                yield {"path": path, "predictions": best}
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


def _write(loaded: loading.Loaded, paths: list[str], asked: argparse.Namespace) -> None:
    start = time.monotonic()
    unreadable: list[str] = []
    screen = console(stderr=True)
    shows_rows = asked.output is None and sys.stdout.isatty()
    bar = Progress(
        console=screen,
        transient=True,
        redirect_stdout=False,
        disable=shows_rows or not screen.is_terminal,
        auto_refresh=False,  # a thread of its own might hold a lock that the loader's processes need when forked
    )
    with bar, _file(asked.output) as file:
        rows = bar.track(
            _rows(loaded, paths, asked.top_k, unreadable), len(paths), description="images"
        )
        FORMATS[asked.format](file, rows, paths, loaded, asked.top_k)
    noun = "image" if len(paths) == 1 else "images"
    end = f", {len(unreadable):,} unreadable" if unreadable else ""
    print(f"{len(paths):,} {noun} in {time.monotonic() - start:.1f} s{end}", file=sys.stderr)
    if asked.output:
        print(asked.output)
    if len(unreadable) == len(paths):
        raise UserError(f"none of the {len(paths):,} images can be read")


@contextlib.contextmanager
def _file(output: Path | None) -> Iterator[IO[str]]:
    """The file to write, which appears once complete, or standard output. Names may hold bytes that are not text."""
    if output is None:
        yield sys.stdout
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    # an exit removes what is half written
    with contextlib.suppress(ValueError):  # signals are for the main thread
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with disk.atomic_write(output) as beside, beside.open("w", **disk.TABLE) as file:
        yield file


def _table(
    file: IO[str], rows: Rows, paths: list[str], loaded: loading.Loaded, top_k: int | None
) -> None:
    """Rows as they come, in columns."""
    path_width = min(max(map(len, paths)), WIDEST)
    class_width = min(max(map(len, loaded.class_names)), WIDEST // 2)
    for row in rows:
        path = printable(row["path"])
        if len(path) > path_width:
            path = f"…{path[1 - path_width :]}"
        print(f"{path:<{path_width}}  {_cells(row, class_width)}".rstrip(), file=file)


def _cells(row: Row, class_width: int) -> str:
    """What the table says of an image."""
    if "error" in row:
        return "unreadable"
    if not row["predictions"]:
        return "no class"
    first, *others = row["predictions"]
    rest = ", ".join(f"{other['class']} {other['probability']:.1%}" for other in others)
    return f"{first['class']:<{class_width}} {first['probability']:6.1%}  {rest}"


def _csv(
    file: IO[str], rows: Rows, paths: list[str], loaded: loading.Loaded, top_k: int | None
) -> None:
    """path, class, probability, class_2, probability_2, ..., error; with several labels per image one cell for all."""
    several = loaded.task.several
    count = 1 if several else min(top_k or 5, len(loaded.class_names))
    columns = ["path", "class", "probability"]
    for rank in range(2, count + 1):
        columns += [f"class_{rank}", f"probability_{rank}"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, "error"])
    for row in rows:
        path = (
            row["path"]
            if file is not sys.stdout
            else CONTROL.sub("\N{REPLACEMENT CHARACTER}", row["path"])
        )
        names = [best["class"] for best in row.get("predictions", ())]
        figures = [f"{best['probability']:.4f}" for best in row.get("predictions", ())]
        # as in a table of labels; without a class ";" stands alone
        if several and "error" not in row:
            names = [";".join(names) or ";"]
            figures = [";".join(figures)]
        cells = [path, *chain(*zip(names, figures, strict=True))]
        padding = [""] * (len(columns) - len(cells))
        writer.writerow([*cells, *padding, row.get("error", "")])


def _jsonl(file: IO[str], rows: Rows, *_: Any) -> None:
    for row in rows:
        print(json.dumps(row), file=file)


FORMATS: dict[str, Callable[..., None]] = {"table": _table, "csv": _csv, "jsonl": _jsonl}
