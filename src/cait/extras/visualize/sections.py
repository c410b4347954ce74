"""The sections of a page: attention maps of images, curves, and what the network gets wrong."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cait import plugins
from cait.cli import saved
from cait.cli.loading import Loaded
from cait.data.dataset import channels_last
from cait.data.folder import FolderSource, scan_flat
from cait.data.reading import UnreadableImageError, load_rgb
from cait.errors import UserError
from cait.extras import curves, page, plots
from cait.extras.network_name import network_name
from cait.extras.visualize import attention, labels, mistakes
from cait.model import network

PAGE = "index.html"
WORST = 24
MANY = 5000
CONFUSIONS = 15
MIXES = {"mixup": "Mixup", "cutmix": "CutMix"}
Photographs = Iterator[tuple[str, Any, str | None]]
"""Names, PIL images in RGB, and the names of their classes; None where nobody knows."""


def write(loaded: Loaded, folder: Path | None, given: argparse.Namespace, output: Path, command: str) -> Path:
    """Draw the images into files, and put them on a page with the curves and the mistakes of the run in `folder`.

    Args:
        given: the options of `cait visualize`.
        output: folder of the files.
        command: how this was called.

    Returns:
        the path of the page.
    """
    fields = loaded.module.hparams.get("fields") if loaded.module else None
    facts = [
        ("weights", loaded.about),
        ("model", f"{network_name(loaded.name, fields)}, {loaded.data.img_size} × {loaded.data.img_size} pixels"),
    ]
    parts = []
    if folder is None or given.images or given.self_attention or attention.has_maps(loaded.network):
        network.require(loaded.network, loaded.name, "maps", "visualize")
        parts.append(("Attention maps", _images(loaded, given, output)))
    else:
        print(f"no attention maps: {loaded.name} has no class attention", flush=True)
    if folder is not None:
        parts.append(("Curves", _curves(folder)))
        parts += [(table.title, _compared(table)) for table in plugins.results(folder)]
    if folder is not None and not given.no_validation:
        parts = _mistakes(loaded, facts, output) + parts  # what is wrong comes first
    page.write(output / PAGE, f"{given.source}: what the network sees", [*facts, ("command", command)], parts)
    return output / PAGE


def _images(loaded: Loaded, given: argparse.Namespace, output: Path) -> str:
    """Draw each image into a file and print its likely classes. Returns the figures as HTML."""
    data, names = loaded.data, loaded.class_names
    html = [page.paragraph(attention.CAPTION)]
    written: list[Path] = []
    chosen = _from_disk(given.images, given.num_images, data) if given.images else _one_of_each_class(loaded)
    for name, photograph, label in itertools.islice(chosen, given.num_images):
        image, pixels = _seen(data, channels_last(data.eval_transform(photograph)))
        view = attention.look(loaded.network, image, given.self_attention, given.query, loaded.task)
        box = crop_box(data, *photograph.size)
        picture = attention.Picture(view, photograph, pixels, box, names)
        written.append(_new_path(output, name, written))
        plots.write(picture.figure(), written[-1])
        best = attention.likely(view.probabilities, names)
        words = ", ".join(f"{taken} {value:.1%}" for taken, value in best)
        verdict = f"predicted {best[0][0]} at {best[0][1]:.1%}"
        if label is not None:
            words += f"; true class {label}"
            verdict = f"true {label}, {verdict}"
        print(f"{os.path.relpath(written[-1])}  {words}", flush=True)
        figures = [page.embed(half, name) for half in picture.halves()]
        html += [page.heading(name), page.paragraph(verdict), page.beside(*figures)]
    if not written:
        raise UserError(f"no validation image of {data.root} can be read")
    return "\n".join(html)


def _from_disk(places: Sequence[str], most: int, data: Any) -> Photographs:
    """The images of files and folders; a line says if they are more than `most`."""
    paths: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"there is no image {place}")
        paths += [Path(path) for path, _ in scan_flat(place)] if place.is_dir() else [place]
    if len(paths) > most:
        print(f"the first {most} of {len(paths):,} images; --num_images {len(paths)} draws all")
    for path in paths:
        yield path.name, load_rgb(path, reading=data.preprocessing.reading), None


def _one_of_each_class(loaded: Loaded) -> Photographs:
    """The first readable validation image of each class."""
    samples = _validation(loaded).samples
    names = loaded.label_names
    shown: set[int] = set()
    for index in range(len(samples)):
        name = samples.name(index)
        try:
            raw, label = samples[index]
            if label < 0 or label in shown:
                continue
            image = load_rgb(raw, name, loaded.data.preprocessing.reading)
        except UnreadableImageError:
            continue
        shown.add(label)
        yield f"{names[label]}/{Path(name).name}", image, names[label]
        if len(shown) == len(names):
            return


def _validation(loaded: Loaded) -> Any:
    """The validation images of the run; a UserError if they are not here or have other classes than the checkpoint."""
    data = loaded.data
    data.setup("validate")
    if loaded.data_state is not None:
        data.load_state_dict(loaded.data_state)
    if data.num_classes != len(loaded.class_names):
        raise UserError(f"the network knows {len(loaded.class_names)} classes, {data.root} has {data.num_classes}")
    return data.val_images


def _short(name: str) -> str:
    """The file and its folder."""
    return str(Path(*Path(name).parts[-2:]))


def _seen(data: Any, pixels: Tensor) -> tuple[Tensor, Any]:
    """The network's input [3, S, S] of an image as `EvalImages` has it, and the same as uint8 [S, S, 3]."""
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    return image, plots.pixels(image, data.preprocessing)


def crop_box(data: Any, width: int, height: int) -> tuple[float, float, float, float] | None:
    """(left, top, right, bottom) in pixels of what the evaluation transform keeps of an image of width × height.

    It reaches beyond an image that is padded. None for a transform of your own, which may do anything.
    """
    if data.has_own_eval_transform:
        return None
    how, ends = data.preprocessing, []
    whole = math.floor(data.img_size / how.crop_pct)
    for side in (width, height):
        if how.fit == "pad":
            resized = max(1, round(side / (max(width, height) / whole)))
        else:
            resized = whole if how.fit == "squash" else int(whole * side / min(width, height))
        start = round((resized - data.img_size) / 2)
        if resized < data.img_size:
            start = -((data.img_size - resized) // 2)
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


def _curves(folder: Path) -> str:
    try:
        logged = curves.read(folder)
    except UserError as error:
        return page.paragraph(str(error))
    figures = [page.embed(curves.draw({folder.name: logged}, [title]), title) for title in curves.panels([logged])]
    return page.paragraph(_about_training(saved.data_settings(folder))) + page.beside(*figures)


def _about_training(settings: Mapping[str, Any]) -> str:
    """Why the curves of training and validation are not of the same images."""
    strengths = [f"{name} {settings[key]:g}" for key, name in MIXES.items() if settings.get(key)]
    share = settings.get("mix_prob", 0)
    mixed = f", mixed by {' and '.join(strengths)} in {share:.0%} of the batches" if strengths and share else ""
    lower = "; so train accuracy can be below validation accuracy" if mixed else ""
    return f"Training is measured on single batches of augmented images{mixed}{lower}. The line is their running mean."


def _compared(table: plugins.Results) -> str:
    return page.table(table.head, table.rows) + (page.paragraph(f"{table.note}.") if table.note else "")


def _mistakes(loaded: Loaded, facts: list[tuple[str, str]], output: Path) -> list[tuple[str, str]]:
    """Score the validation set now: figures of an earlier evaluation may be of other weights."""
    if loaded.task.several:
        return [("Mistakes", page.paragraph("An image may have several classes; `cait eval` has the figures of each."))]
    try:
        validation, names = _validation(loaded), loaded.class_names
        if len(validation) > MANY:
            print(f"scoring {len(validation):,} validation images; --no_validation leaves that out", flush=True)
        scored = mistakes.score(loaded.network, loaded.data.val_dataloader())
    except UserError as error:  # a run from elsewhere, whose images are not here
        print(f"the validation set is not scored: {error}")
        return [("Mistakes", page.paragraph(f"The validation set is not scored: {error}"))]
    result = f"top-1 {scored.acc1:.2f} % of {scored.counted.sum():,} validation images"
    print(result)
    facts.append(("scored now", result))
    if isinstance(loaded.data.source, FolderSource):
        output.mkdir(parents=True, exist_ok=True)
        labels.write(output / labels.TABLE, loaded.data.source, scored)
        print(os.path.relpath(output / labels.TABLE))
        facts.append(("labels", f"{os.path.relpath(output / labels.TABLE)}, the most doubtful first"))
    pairs = [(names[true], names[taken], f"{count:,}") for true, taken, count in scored.confusions(CONFUSIONS)]
    matrix = page.embed(mistakes.confusion(scored, names), "confusion matrix")
    frequent = page.table(("true class", "predicted", "images"), pairs) if pairs else ""
    samples = validation.samples
    tiles = [
        (
            _seen(loaded.data, validation[index][0])[1],
            f"true {names[scored.labels[index]]}, predicted {names[scored.predicted[index]]}",
            f"at {scored.probabilities[index]:.1%}, loss {scored.losses[index]:.2f}; {_short(samples.name(index))}",
        )
        for index in scored.worst(WORST)
    ]
    worst = page.paragraph("As the network sees them, the highest loss first.") + page.tiles(tiles)
    return [
        ("Worst mistakes", worst if tiles else page.paragraph("Every image is right.")),
        ("Confusion", page.paragraph(mistakes.CAPTION) + page.beside(frequent, matrix)),
    ]
