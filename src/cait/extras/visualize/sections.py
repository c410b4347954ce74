"""The sections of a page: attention maps of images, curves, and what the network gets wrong."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from cait import plugins
from cait.cli.loading import Loaded
from cait.data.dataset import channels_last
from cait.data.folder import FolderSource, scan_flat
from cait.data.reading import UnreadableImageError, load_rgb
from cait.errors import UserError
from cait.extras import curves, page, plots
from cait.extras.visualize import attention, mistakes
from cait.extras.words import network_name
from cait.model import network

PAGE, TABLE = "index.html", "labels.csv"
WORST, CONFUSIONS = 24, 15
ABOUT_TRAINING = (
    "Training is measured on single batches of augmented images; the line is their running mean. With Mixup or CutMix "
    "its accuracy can be below that of validation, because mixed images are harder."
)
Photographs = Iterator[tuple[Path, Any, str | None]]
"""Paths, PIL images in RGB, and the names of their classes; None where nobody knows."""


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
    if folder is None or given.images or attention.has_maps(loaded.network):
        network.require(loaded.network, loaded.name, "maps", "visualize")
        parts.append(("Attention maps", _images(loaded, given, output)))
    else:
        print(f"no attention maps: {loaded.name} has no class attention", flush=True)
    if folder is not None:
        parts.append(("Curves", _curves(folder)))
        parts += [(table.title, _compared(table)) for table in plugins.results(folder)]
        if not given.no_validation:
            parts = _mistakes(loaded, facts, output) + parts  # what is wrong comes first
    page.write(output / PAGE, f"{given.source}: what the network sees", [*facts, ("command", command)], parts)
    return output / PAGE


def _images(loaded: Loaded, given: argparse.Namespace, output: Path) -> str:
    """Draw each image into a file and print its likely classes. Returns the figures as HTML."""
    html = [page.paragraph(attention.CAPTION)]
    chosen = _from_disk(given.images, given.num_images, loaded.data) if given.images else _one_of_each_class(loaded)
    for path, photograph, label in itertools.islice(chosen, given.num_images):
        image, pixels = _seen(loaded.data, channels_last(loaded.data.eval_transform(photograph)))
        view = attention.look(loaded.network, image, loaded.task, given.self_attention, given.query)
        figure = attention.draw(view, photograph, pixels, loaded.class_names)
        name = f"{path.parent.name}/{path.stem}"
        file = output / (re.sub(r"[^\w.-]+", "-", name).lstrip(".-")[:100] + ".png")
        plots.write(figure, file)
        words = ", ".join(
            f"{taken} {value:.1%}" for taken, value in attention.likely(view.probabilities, loaded.class_names)
        )
        words += f"; true class {label}" if label is not None else ""
        print(f"{os.path.relpath(file)}  {words}", flush=True)
        html += [page.paragraph(f"{name}: {words}"), page.embed(figure, name)]
    if len(html) == 1:
        raise UserError(f"no validation image of {loaded.data.root} can be read")
    return "\n".join(html)


def _from_disk(places: list[str], most: int, data: Any) -> Photographs:
    """The images of files and folders; a line says if they are more than `most`."""
    paths: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"there is no image {place}")
        paths += [Path(path) for path, _ in scan_flat(place)] if place.is_dir() else [place]
    if len(paths) > most:
        print(f"the first {most} of {len(paths):,} images; --num_images {len(paths)} draws all")
    for path in paths:
        yield path, load_rgb(path, reading=data.preprocessing.reading), None


def _one_of_each_class(loaded: Loaded) -> Photographs:
    """The first readable validation image of each class."""
    samples, names = _validation(loaded).samples, loaded.label_names
    shown = {-1}  # images that do not count
    for index in range(len(samples)):
        name = samples.name(index)
        try:
            raw, label = samples[index]
            if label not in shown:
                image = load_rgb(raw, name, loaded.data.preprocessing.reading)
                shown.add(label)
                yield Path(names[label], Path(name).name), image, names[label]
                if len(shown) > len(names):
                    return
        except UnreadableImageError:
            continue


def _validation(loaded: Loaded) -> Any:
    """The validation images of the run; a UserError if they are not here or have other classes than the checkpoint."""
    data = loaded.data
    data.setup("validate")
    if loaded.data_state is not None:
        data.load_state_dict(loaded.data_state)
    if data.num_classes != len(loaded.class_names):
        raise UserError(f"the network knows {len(loaded.class_names)} classes, {data.root} has {data.num_classes}")
    return data.val_images


def _seen(data: Any, pixels: Tensor) -> tuple[Tensor, Any]:
    """The network's input [3, S, S] of an image as `EvalImages` has it, and the same as uint8 [S, S, 3]."""
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    return image, plots.pixels(image, data.preprocessing)


def _curves(folder: Path) -> str:
    try:
        logged = curves.read(folder)
    except UserError as error:
        return page.paragraph(str(error))
    return page.paragraph(ABOUT_TRAINING) + page.embed(curves.draw({folder.name: logged}), "curves")


def _compared(table: plugins.Results) -> str:
    return page.table(table.head, table.rows) + (page.paragraph(f"{table.note}.") if table.note else "")


def _mistakes(loaded: Loaded, facts: list[tuple[str, str]], output: Path) -> list[tuple[str, str]]:
    """Score the validation set now: figures of an earlier evaluation may be of other weights."""
    if loaded.task.several:
        return [("Mistakes", page.paragraph("An image may have several classes; `cait eval` has the figures of each."))]
    try:
        images, names, source = _validation(loaded), loaded.class_names, loaded.data.source
        scored = mistakes.score(loaded.network, loaded.data.val_dataloader())
    except UserError as error:  # a run from elsewhere, whose images are not here
        print(f"the validation set is not scored: {error}")
        return [("Mistakes", page.paragraph(f"The validation set is not scored: {error}"))]
    counted, wrong = scored.counted.sum(), scored.wrong.sum()
    result = f"top-1 {100 * (1 - wrong / max(counted, 1)):.2f} % of {counted:,} validation images"
    print(result)
    facts.append(("scored now", result))
    if isinstance(source, FolderSource):
        output.mkdir(parents=True, exist_ok=True)
        mistakes.write_labels(output / TABLE, source, scored)
        print(os.path.relpath(output / TABLE))
    tiles = [
        (
            _seen(loaded.data, images[index][0])[1],
            f"true {names[scored.labels[index]]}, predicted {names[scored.predicted[index]]}",
            f"at {scored.probabilities[index]:.1%}, loss {scored.losses[index]:.2f}; "
            + "/".join(Path(images.samples.name(index)).parts[-2:]),
        )
        for index in scored.worst(WORST)
    ]
    pairs = [(names[true], names[taken], f"{count:,}") for (true, taken), count in scored.confusions(CONFUSIONS)]
    frequent = page.table(("true class", "predicted", "images"), pairs) if pairs else ""
    matrix = page.embed(mistakes.confusion(scored, names), "confusion matrix")
    worst = page.paragraph("As the network sees them, the highest loss first.") + page.tiles(tiles)
    return [
        ("Worst mistakes", worst if tiles else page.paragraph("Every image is right.")),
        ("Confusion", page.paragraph(mistakes.CAPTION) + page.beside(frequent, matrix)),
    ]
