"""The images of a page: which ones are drawn, what the network sees of each, and a file for each figure."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from cait.cli.loading import Loaded
from cait.data.dataset import channels_last
from cait.data.folder import scan_flat
from cait.data.reading import Reading, UnreadableImageError, load_rgb
from cait.errors import UserError
from cait.extras import plots
from cait.extras.visualize import attention, page


class Photograph(NamedTuple):
    name: str
    image: Any
    """A PIL image in RGB."""
    label: int | None


def draw(
    loaded: Loaded,
    places: Sequence[str] | None,
    most: int,
    output: Path,
    blocks: Sequence[int],
    query: tuple[int, int] | None,
) -> str:
    """Draw each image into a file and print its likely classes. Returns the figures as HTML.

    Args:
        places: files and folders of images; None draws validation images of the run.
        most: number of images.
        output: folder of the files.
        blocks: self-attention blocks to show too.
        query: row and column of the patch whose self-attention is shown.
    """
    data, names = loaded.data, loaded.class_names
    html = [page.paragraph(attention.CAPTION)]
    written: list[Path] = []
    chosen = from_disk(places, most, data.preprocessing.reading) if places else one_of_each_class(loaded, most)
    for name, photograph, label in chosen:
        image, pixels = seen(data, channels_last(data.eval_transform(photograph)))
        box = crop_box(data, *photograph.size)
        view = attention.look(loaded.network, photograph, image, pixels, box, blocks, query)
        figure = attention.figure(view, names)
        written.append(_new_path(output, name, written))
        plots.write(figure, written[-1])
        words = _likely(view.probabilities, label, names)
        print(f"{os.path.relpath(written[-1])}  {words}", flush=True)
        html += [page.heading(name), page.paragraph(words), page.wide(page.embed(figure, name))]
    if not written:
        raise UserError(f"no validation image of {data.root} can be read")
    return "\n".join(html)


def from_disk(places: Sequence[str], most: int, reading: Reading) -> Iterator[Photograph]:
    """The images of files and folders, at most `most`.

    Raises:
        UserError: there is no such place, no image in it, or an image that cannot be read.
    """
    paths: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"there is no image {place}")
        paths += [place] if place.is_file() else [Path(path) for path, _ in scan_flat(place)]
    if len(paths) > most:
        print(f"the first {most} of {len(paths):,} images; --num_images {len(paths)} draws all")
    for path in paths[:most]:
        yield Photograph(path.name, load_rgb(path, reading=reading), None)


def one_of_each_class(loaded: Loaded, most: int) -> Iterator[Photograph]:
    """The first readable validation image of each class, for at most `most` classes."""
    samples = validation(loaded).samples
    shown: set[int] = set()
    for index in range(len(samples)):
        if len(shown) == min(most, len(loaded.class_names)):
            return
        name = samples.name(index)
        try:
            raw, label = samples[index]
            if label < 0 or label in shown:
                continue
            image = load_rgb(raw, name, loaded.data.preprocessing.reading)
        except UnreadableImageError:
            continue
        shown.add(label)
        yield Photograph(f"{loaded.class_names[label]}/{Path(name).name}", image, label)


def validation(loaded: Loaded) -> Any:
    """The validation images of the run.

    Raises:
        UserError: they cannot be found, or have other classes than the checkpoint.
    """
    data = loaded.data
    data.setup("validate")
    if loaded.data_state is not None:
        data.load_state_dict(loaded.data_state)
    if data.num_classes != len(loaded.class_names):
        raise UserError(f"the network knows {len(loaded.class_names)} classes, {data.root} has {data.num_classes}")
    return data.val_images


def seen(data: Any, pixels: Tensor) -> tuple[Tensor, Any]:
    """The network's input [3, S, S] of an image as `EvalImages` has it, and the same as uint8 [S, S, 3]."""
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    return image, data.preprocessing.denormalized(image)


def crop_box(data: Any, width: int, height: int) -> tuple[float, float, float, float] | None:
    """(left, top, right, bottom) in pixels of what the evaluation transform keeps of an image of width × height.

    None for a transform of your own, which may do anything.
    """
    if data.has_own_eval_transform:
        return None
    shorter, resized_shorter = min(width, height), math.floor(data.img_size / data.preprocessing.crop_pct)
    ends = []
    for side in (width, height):
        resized = int(resized_shorter * side / shorter)
        start = round((resized - data.img_size) / 2)
        ends.append((start * side / resized, (start + data.img_size) * side / resized))
    (left, right), (top, bottom) = ends
    return left, top, right, bottom


def _new_path(folder: Path, name: str, written: list[Path]) -> Path:
    """A path for the figure of an image; images with the same name get different paths."""
    stem = re.sub(r"[^\w.-]+", "-", re.sub(r"\.[A-Za-z]+$", "", name)).lstrip(".-")[:100] or "image"
    path, number = folder / f"{stem}.png", 2
    while path in written:
        path, number = folder / f"{stem}-{number}.png", number + 1
    return path


def _likely(probabilities: Tensor, label: int | None, class_names: Sequence[str]) -> str:
    best = probabilities.topk(min(5, len(probabilities)))
    named = [f"{class_names[i]} {p:.1%}" for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    return ", ".join(named) + (f"; true class {class_names[label]}" if label is not None else "")
