"""The sections of a page: maps of images, curves, and what the network gets wrong."""

import argparse
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay
from torch import Tensor

from cait import plugins
from cait.cli.loading import Loaded
from cait.data.dataset import channels_last
from cait.data.folder import scan_flat
from cait.data.reading import UnreadableImageError, load_image
from cait.errors import UserError, say, tell
from cait.extras import curves, page, plots
from cait.extras.display import network_name
from cait.extras.visualize import maps

PAGE = "index.html"
WORST, CONFUSIONS = 24, 15
MOST_CLASSES = 30
"""With more classes a confusion matrix has no room for their names."""
ABOUT_MATRIX = "A row is a true class: the shares of its images that went to each class."
ABOUT_TRAINING = (
    "Training is measured on single batches of augmented images. With Mixup or CutMix its accuracy can be below that "
    "of validation, because mixed images are harder."
)
Section = tuple[str, str]
"""A heading and HTML."""


class Scored(NamedTuple):
    """What the network says of an image."""

    place: int
    """In the order of the loader."""
    label: int
    predicted: int
    probability: float
    """Of the predicted class."""
    loss: float
    """Cross entropy."""


def write(loaded: Loaded, folder: Path | None, given: argparse.Namespace, output: Path, command: str) -> Path:
    """Draw the images into files, and put them on a page with the curves and the mistakes of the run in `folder`.

    Returns the path of the page, which shows the `command` that made it.
    """
    fields = loaded.module.hparams.get("fields") if loaded.module else None
    name, size = network_name(loaded.name, fields), loaded.data.img_size
    facts = [("weights", loaded.about), ("model", f"{name}, {size} × {size} pixels"), ("command", command)]
    facts += [("pixels", plots.SHOWN)] if loaded.data.settings.reader else []
    sections: list[Section] = []
    try:
        sections.append(_maps(loaded, given, output))
    except maps.NoMapsError as error:
        if folder is None or given.images:
            raise
        say(f"no maps: {error}")
    if folder is not None:
        sections.append(_curves(folder))
        for table in plugins.results(folder):
            sections.append((table.title, page.table(table.head, table.rows) + page.paragraph(table.note)))
        if not given.no_validation:
            sections = [*_mistakes(loaded), *sections]  # what is wrong comes first
    page.write(output / PAGE, f"{given.source or given.name}: what the network sees", facts, sections)
    return output / PAGE


@torch.no_grad()
def _maps(loaded: Loaded, given: argparse.Namespace, output: Path) -> Section:
    """Draw each image into a file and print its likely classes."""
    html, drawn = [page.paragraph(maps.CAPTIONS[maps.kind(loaded.network)])], Counter[str]()
    chosen = _named_images(given.images, loaded.data) if given.images else _one_of_each_class(loaded)
    for name, prepared, label in itertools.islice(chosen, given.num_images):
        image = _seen(loaded, prepared)
        probabilities = loaded.task.probabilities(loaded.network(image[None]))
        if not probabilities.isfinite().all():
            raise maps.NoMapsError("the network's answers are not finite")
        (best,) = loaded.task.best(probabilities, loaded.class_names)
        words = ", ".join(f"{each['class']} {each['probability']:.1%}" for each in best) or "no class"
        words += f"; true class {label}" if label is not None else ""
        figure = maps.draw(maps.look(loaded.network, image), plots.pixels(image, loaded.data.settings), words)
        stem = re.sub(r"[^\w.-]+", "-", name).lstrip(".-")[:100]
        drawn[stem.lower()] += 1
        number = drawn[stem.lower()]
        file = output / f"{stem}{f'+{number}' if number > 1 else ''}.png"  # of several with one name
        plots.write(figure, file)
        say(f"{os.path.relpath(file)}  {words}")
        html += [page.paragraph(name), page.embed(figure, name)]
    if len(html) == 1:
        raise UserError(f"no image of {', '.join(given.images or [str(loaded.data.root)])} can be read")
    return "Maps", "\n".join(html)


def _named_images(places: list[str], data: Any) -> Iterator[tuple[str, Tensor, None]]:
    """The names of the images of files and folders, and the images as `EvalImages` has them."""
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"there is no image {place}")
        for path in [Path(path) for path, _ in scan_flat(place)] if place.is_dir() else [place]:
            try:
                image = load_image(path, reading=data.settings)
            except UnreadableImageError as error:
                if not place.is_dir():
                    raise
                tell(f"{error}; it is left out")
                continue
            yield f"{path.parent.name}/{path.stem}", channels_last(data.eval_transform(image)), None


def _one_of_each_class(loaded: Loaded) -> Iterator[tuple[str, Tensor, str]]:
    """The first readable validation image of each class, and the class."""
    images, names = loaded.validation(), loaded.label_names
    unseen = {*range(len(names))}
    for index in range(len(images)):
        with suppress(UnreadableImageError):
            if images.samples[index][1] not in unseen:  # without decoding it
                continue
            pixels, label = images[index]
            if label in unseen:
                unseen.remove(label)
                yield f"{names[label]}/{Path(images.samples.name(index)).stem}", pixels, names[label]


def _seen(loaded: Loaded, pixels: Tensor) -> Tensor:
    """The network's input [C, S, S] of an image as `EvalImages` has it."""
    (image,), _ = loaded.data.on_after_batch_transfer((pixels[None], None), 0)
    return image.to(next(loaded.network.parameters()).device)


def _curves(folder: Path) -> Section:
    try:
        figure = curves.draw({folder.name: curves.read(folder)})
    except UserError as error:
        return "Curves", page.paragraph(str(error))
    return "Curves", page.paragraph(ABOUT_TRAINING) + page.embed(figure, "curves")


def _mistakes(loaded: Loaded) -> list[Section]:
    """Score the validation set now: figures of an earlier evaluation may be of other weights."""
    if loaded.task.several:
        return [("Mistakes", page.paragraph("An image may have several classes; `cait eval` has the figures of each."))]
    try:
        images, names = loaded.validation(), loaded.class_names
        scored = score(loaded.judge(images.samples))
    except UserError as error:  # a run from elsewhere, whose images are not here
        say(f"the validation set is not scored: {error}")
        return [("Mistakes", page.paragraph(f"The validation set is not scored: {error}"))]
    if not all(math.isfinite(each.loss) for each in scored):
        return [("Mistakes", page.paragraph("The network's answers are not finite, so there are no figures."))]
    wrong = [each for each in scored if each.predicted != each.label]
    result = f"top-1 {100 * (1 - len(wrong) / max(len(scored), 1)):.2f} % of {len(scored):,} validation images"
    print(result)
    tiles = []
    for each in wrong[:WORST]:
        title = f"true {names[each.label]}, predicted {names[each.predicted]}"
        file = "/".join(Path(images.samples.name(each.place)).parts[-2:])
        image = _seen(loaded, images[each.place][0])
        pixels = plots.pixels(image, loaded.data.settings)
        tiles.append((pixels, title, f"at {each.probability:.1%}, loss {each.loss:.2f}; {file}"))
    taken = Counter((names[each.label], names[each.predicted]) for each in wrong)
    pairs = [(*pair, f"{count:,}") for pair, count in taken.most_common(CONFUSIONS)]
    confusion = page.table(("true class", "predicted", "images"), pairs)
    if len(names) <= MOST_CLASSES:
        matrix = draw_confusion(scored, names)
        confusion += page.paragraph(ABOUT_MATRIX) + page.embed(matrix, "confusion matrix")
    return [
        ("Worst mistakes", page.paragraph(f"{result}. The highest loss comes first.") + page.tiles(tiles)),
        ("Confusion", confusion),
    ]


def score(judged: Iterable[tuple[Tensor, Tensor]]) -> list[Scored]:
    """The images of batches as `Loaded.judge` has them, the highest loss first; those without a label are left out."""
    found: list[Scored] = []
    place = 0
    for probabilities, labels in judged:
        best, predicted = probabilities.max(dim=1)
        of_label = probabilities.gather(1, labels.clamp_min(0)[:, None])[:, 0]
        losses = -of_label.clamp_min(torch.finfo(torch.float32).tiny).log()
        columns = [column.tolist() for column in (labels, predicted, best, losses)]
        found += [Scored(place + row, *cells) for row, cells in enumerate(zip(*columns, strict=True))]
        place += len(labels)
    return sorted((each for each in found if each.label >= 0), key=lambda each: each.loss, reverse=True)


def draw_confusion(scored: Sequence[Scored], class_names: Sequence[str]) -> Figure:
    """scikit-learn's confusion matrix, each row as shares of its class."""
    side = 2 + 0.4 * len(class_names)
    figure, ((axes,),) = plots.grid(1, 1, side, side)
    colors = {"norm": PowerNorm(0.4, vmin=0, vmax=1)}  # rare mistakes are visible beside the diagonal
    cells = dict(values_format=".0%", text_kw={"fontsize": 7}, im_kw=colors, colorbar=False)
    names = dict(labels=range(len(class_names)), display_labels=class_names, xticks_rotation="vertical")
    labels, predicted = [each.label for each in scored], [each.predicted for each in scored]
    ConfusionMatrixDisplay.from_predictions(labels, predicted, normalize="true", ax=axes, **cells, **names)
    return figure
