"""The sections of a page: maps of images, curves, and what the network gets wrong."""

import argparse
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from cait.extras.features import one_of_each
from cait.extras.visualize import maps

PAGE = "index.html"
WORST = 24
MOST_CLASSES = 30
"""With more classes a confusion matrix has no room for their names."""
ABOUT_MATRIX = "A row is a true class: the shares of its images that went to each class."
ABOUT_TRAINING = (
    "Training is measured on single batches of augmented images. With Mixup or CutMix its accuracy can be below that "
    "of validation, because mixed images are harder."
)
Section = tuple[str, str]
"""A heading and HTML."""
Named = tuple[str, Tensor, str | None]
"""The name of an image, the image as `EvalImages` has it, and its class if that is known."""


class Scored(NamedTuple):
    """What the network says of an image."""

    place: int
    """Its number in the order of the loader."""
    label: int
    predicted: int
    probability: float
    """Of the predicted class."""
    loss: float
    """Cross entropy."""


def write(
    loaded: Loaded, folder: Path | None, given: argparse.Namespace, output: Path, command: str
) -> Path:
    """Draw the images into files, and put them on a page with the curves and the mistakes of the run in `folder`.

    Returns the path of the page, which shows the `command` that made it.
    """
    name = network_name(loaded.name, loaded.module and loaded.module.hparams.get("fields"))
    size = loaded.data.img_size
    facts = [
        ("weights", loaded.about),
        ("model", f"{name}, {size} × {size} pixels"),
        ("command", command),
    ]
    if loaded.data.settings.reader:
        facts.append(("pixels", plots.SHOWN))
    sections: list[Section] = []
    try:
        sections.append(_maps(loaded, given, output))
    except maps.NoMapsError as error:
        if not folder or given.images:
            raise
        say(f"no maps: {error}")
    if folder:
        sections.append(_curves(folder))
        for table in plugins.results(folder):
            sections.append(
                (table.title, page.table(table.head, table.rows) + page.paragraph(table.note))
            )
        if not given.no_validation:
            sections[:0] = _mistakes(loaded)  # what is wrong comes first
    page.write(
        output / PAGE, f"{given.source or given.name}: what the network sees", facts, sections
    )
    return output / PAGE


@torch.no_grad()
def _maps(loaded: Loaded, given: argparse.Namespace, output: Path) -> Section:
    """Draw each image into a file and print its likely classes."""
    html = [page.paragraph(maps.CAPTIONS[maps.kind(loaded.network)])]
    names = Counter[str]()
    images = (
        _named_images(given.images, loaded.data) if given.images else _one_of_each_class(loaded)
    )
    for name, prepared, label in itertools.islice(images, given.num_images):
        image = _seen(loaded, prepared)
        probabilities = loaded.probabilities(image[None])
        if not probabilities.isfinite().all():
            raise maps.NoMapsError("the network's answers are not finite")
        (best,) = loaded.task.best(probabilities, loaded.class_names)
        words = (
            ", ".join(f"{answer['class']} {answer['probability']:.1%}" for answer in best)
            or "no class"
        )
        if label is not None:
            words += f"; true class {label}"
        figure = maps.draw(
            maps.look(loaded.network, image), plots.pixels(image, loaded.data.settings), words
        )
        stem = re.sub(r"[^\w.-]+", "-", name).lstrip(".-")[:100]
        names[stem.lower()] += 1
        count = names[stem.lower()]
        file = output / (f"{stem}+{count}.png" if count > 1 else f"{stem}.png")
        plots.write(figure, file)
        say(f"{os.path.relpath(file)}  {words}")
        html += [page.paragraph(name), page.embed(figure, name)]
    if len(html) == 1:
        raise UserError(
            f"no image of {', '.join(given.images or [str(loaded.data.root)])} can be read"
        )
    return "Maps", "\n".join(html)


def _named_images(names: list[str], data: Any) -> Iterator[Named]:
    """The images of files and folders."""
    for named in map(Path, names):
        if not named.exists():
            raise UserError(f"there is no image {named}")
        paths = [Path(path) for path, _ in scan_flat(named)] if named.is_dir() else [named]
        for path in paths:
            try:
                image = load_image(path, reading=data.settings)
            except UnreadableImageError as error:
                if path == named:
                    raise
                tell(f"{error}; it is left out")
                continue
            yield f"{path.parent.name}/{path.stem}", channels_last(data.eval_transform(image)), None


def _one_of_each_class(loaded: Loaded) -> Iterator[Named]:
    """The first readable validation image of each class."""
    images = loaded.validation()
    names = loaded.label_names
    for index, label, _ in one_of_each(images, range(len(names))):
        pixels, _ = images[index]
        file = Path(images.samples.name(index))
        yield f"{names[label]}/{file.stem}", pixels, names[label]


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
        return [
            (
                "Mistakes",
                page.paragraph(
                    "An image may have several classes; `cait eval` has the figures of each."
                ),
            )
        ]
    try:
        images = loaded.validation()
        scored = score(loaded.judge(images.samples))
    except UserError as error:  # a run from elsewhere, whose images are not here
        say(f"the validation set is not scored: {error}")
        return [("Mistakes", page.paragraph(f"The validation set is not scored: {error}"))]
    if not all(math.isfinite(image.loss) for image in scored):
        return [
            (
                "Mistakes",
                page.paragraph("The network's answers are not finite, so there are no figures."),
            )
        ]
    names = loaded.class_names
    wrong = [image for image in scored if image.predicted != image.label]
    result = f"top-1 {100 * (1 - len(wrong) / max(len(scored), 1)):.2f} % of {len(scored):,} validation images"
    print(result)
    tiles = []
    for image in wrong[:WORST]:
        title = f"true {names[image.label]}, predicted {names[image.predicted]}"
        file = "/".join(Path(images.samples.name(image.place)).parts[-2:])
        pixels = plots.pixels(_seen(loaded, images[image.place][0]), loaded.data.settings)
        tiles.append((pixels, title, f"at {image.probability:.1%}, loss {image.loss:.2f}; {file}"))
    pairs = ((names[image.label], names[image.predicted]) for image in wrong)
    confusion = page.most_common("true class", "predicted", pairs)
    if len(names) <= MOST_CLASSES:
        matrix = draw_confusion(scored, names)
        confusion += page.paragraph(ABOUT_MATRIX) + page.embed(matrix, "confusion matrix")
    return [
        (
            "Worst mistakes",
            page.paragraph(f"{result}. The highest loss comes first.") + page.tiles(tiles),
        ),
        ("Confusion", confusion),
    ]


def score(judged: Iterable[tuple[Tensor, Tensor]]) -> list[Scored]:
    """The images of batches as `Loaded.judge` has them, the highest loss first; those without a label are left out."""
    scored: list[Scored] = []
    for probabilities, labels in judged:
        best, predicted = probabilities.max(dim=1)
        of_label = probabilities.gather(1, labels.clamp_min(0)[:, None])[:, 0]
        losses = -of_label.clamp_min(torch.finfo(torch.float32).tiny).log()
        rows = zip(labels.tolist(), predicted.tolist(), best.tolist(), losses.tolist(), strict=True)
        scored += [Scored(number, *row) for number, row in enumerate(rows, len(scored))]
    return sorted(
        (image for image in scored if image.label >= 0), key=lambda image: image.loss, reverse=True
    )


def draw_confusion(scored: Sequence[Scored], class_names: Sequence[str]) -> Figure:
    """scikit-learn's confusion matrix, each row as shares of its class."""
    side = 2 + 0.4 * len(class_names)
    figure, ((axes,),) = plots.grid(1, 1, side, side)
    # rare mistakes are visible beside the diagonal
    colors = {"norm": PowerNorm(0.4, vmin=0, vmax=1)}
    ConfusionMatrixDisplay.from_predictions(
        [image.label for image in scored],
        [image.predicted for image in scored],
        normalize="true",
        ax=axes,
        values_format=".0%",
        text_kw={"fontsize": 7},
        im_kw=colors,
        colorbar=False,
        labels=range(len(class_names)),
        display_labels=class_names,
        xticks_rotation="vertical",
    )
    return figure
