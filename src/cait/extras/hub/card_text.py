"""The text of a model card: Markdown with the Hub's metadata in front, from what a run has written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import cait
from cait.data.source import SplitSource, open_source
from cait.errors import UserError
from cait.extras.network_name import network_name
from cait.extras.scores import SEVERAL, of_several
from cait.plugins import Results

PLACES = (
    *("root", "data_dir", "copies_dir", "labels", "val_list", "predict_root"),
    *("class_names", "cache_gb", "num_workers", "prefetch", "worker_start"),
)
"""Settings of the data that the card leaves out: they are places on this machine, or they change no result."""
WEIGHTS = ("weights", "weights_ema", "teacher_weights", "teacher_path", "mean", "std")
"""Settings of the model that the card leaves out: files on this machine, and what the settings of the data say too."""
TRAINER = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
"""Settings of the Trainer that the card shows."""
CURVES, RELIABILITY = "curves.png", "reliability.png"
NAMED, WEAKEST = 50, 5
"""Up to so many classes are named, and so many of those with the lowest accuracy."""
FITS = {"pad": "puts the colour `mean` around images", "squash": "squashes images"}
"""What the transform does to make an image square, if it cuts nothing off."""
USE = """\
```python
import timm
import torch
from PIL import Image{imports}

model = timm.create_model("hf_hub:{repo}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = {image}.convert("{mode}")
with torch.no_grad():
    probabilities = model(transform(image)[None]).{activation}[0]
for probability, index in zip(*probabilities.topk({most})):
    print(f"{{probability:.3f}}", model.pretrained_cfg["label_names"][index])
```"""


def text(
    repo: str,
    scores: Mapping[str, Any],
    about: Mapping[str, Any],
    config: Mapping[str, Any],
    data_state: Mapping[str, Any],
    images: Sequence[str],
    license: str | None = None,
    tables: Sequence[Results] = (),
) -> str:
    """The card, with the metadata of the Hub in front.

    Args:
        repo: the model's name on the Hub, owner/name.
        scores: of the weights that go with the card, from evaluation.json.
        about: evaluation.json itself.
        config: the run's config.yaml.
        data_state: what the checkpoint says of the data.
        images: files of CURVES and RELIABILITY that lie beside the card.
        license: identifier of the Hub; None leaves it out.
        tables: what extras compare the run with.
    """
    network = network_name(about["model"], config["model"].get("fields"))
    parts = [
        f"---\n{_metadata(repo, scores, config, license)}\n---",
        f"# {repo.partition('/')[2]}",
        f"An image classifier of {len(about['class_names']):,} classes: `{network}` for images of "
        f"{about['img_size']} × {about['img_size']} pixels, trained with PyTorch Lightning and "
        "[CaiT's recipe](https://arxiv.org/abs/2103.17239) or a part of it.",
        "## Results",
        *_results(scores, about),
        *([f"![Reliability diagram]({RELIABILITY})"] if RELIABILITY in images else []),
        *(part for table in tables for part in _compared(table)),
        "## Use",
        *_use(repo, config, about["class_names"], "multi_label" in scores),
        _several(scores["multi_label"]) if "multi_label" in scores else _thresholds(scores),
        "## Training",
        *([f"![Curves of the training]({CURVES})"] if CURVES in images else []),
        "\n".join(_origin(config, about, data_state)),
        f"```yaml\n{yaml.safe_dump(_settings(config), sort_keys=False).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(repo: str, scores: Mapping[str, Any], config: Mapping[str, Any], license: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    name = _data_name(config)
    kind, value, called = "accuracy", scores["acc1"] / 100, "top-1 accuracy"
    if "mAP" in scores:
        kind, value, called = "mAP", scores["mAP"], "mean average precision"
    result = EvalResult(
        task_type="image-classification",
        dataset_type=name.removeprefix("hfds/") if name.startswith("hfds/") else "imagefolder",
        dataset_name=name,
        dataset_split=config["data"].get("val_split"),
        metric_type=kind,
        metric_value=round(value, 4),
        metric_name=called,
    )
    card = ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm"],
        license=license,
        metrics=["accuracy"],
        model_name=repo.partition("/")[2],
        eval_results=[result],
    )
    return card.to_yaml()


def _results(scores: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[str]:
    """The table of the sets' figures, and the classes with the lowest accuracy."""
    sets = {"validation images": scores}
    sets |= {title: scores[key] for key, title in (("real", "ReaL"), ("v2", "ImageNet-V2")) if key in scores}
    sets |= scores.get("extra", {})
    several = "multi_label" in scores
    last = ("mean average precision", "F1") if several else ("calibration error",)
    head = ["set", "images", "top-1", "top-5", "mean of the classes", *last]
    table = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for title, found in sets.items():
        figures = [found.get(name) for name in ("acc1", "acc5", "acc1_macro")]
        shares = [found.get("mAP"), found.get("f1")] if several else [found.get("calibration", {}).get("ece")]
        cells = ["" if figure is None else f"{figure:.2f} %" for figure in figures]
        cells += ["" if share is None else f"{share:.4f}" if several else f"{share:.2f} %" for share in shares]
        table.append(f"| {_cell(title)} | {found['images']:,} | {' | '.join(cells)} |")
    yield "\n".join(table)
    if about.get("tta"):
        yield "Each figure is of the mean over an image and its mirror image."
    weak = sorted((share, name) for name, share in scores["per_class"].items() if share is not None and share < 100)
    if weak:
        yield "Weakest classes: " + ", ".join(f"{_cell(name)} ({share:.1f} %)" for share, name in weak[:WEAKEST]) + "."


def _compared(table: Results) -> Iterator[str]:
    """What an extra compares the run with."""
    rows = [table.head, ["---"] * len(table.head), *(map(_cell, row) for row in table.rows)]
    yield f"### {table.title}"
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if table.note:
        yield f"{_cell(table.note)}."


def _use(repo: str, config: Mapping[str, Any], names: Sequence[str], several: bool = False) -> Iterator[str]:
    """An example in Python, what to do to an image first, and the classes."""
    data, upright = config["data"], config["data"].get("exif_orientation", False)
    image = 'Image.open("image.jpg")'
    yield USE.format(
        repo=repo,
        imports=", ImageOps" if upright else "",
        image=f"ImageOps.exif_transpose({image})" if upright else image,
        mode="L" if (config["model"].get("fields") or {}).get("in_chans") == 1 else "RGB",
        most=min(5, len(names)),
        activation="sigmoid()" if several else "softmax(dim=1)",
    )
    if fit := FITS.get(data.get("fit", "crop")):
        yield f"The transform {fit} that are not square."
    if background := data.get("background"):
        yield f"Put images with transparent parts on {_cell(background)} first."
    if shrink := data.get("shrink"):
        yield f"Halve large images first: `while min(image.size) >= {2 * shrink}: image = image.reduce(2)`."
    if len(names) <= NAMED:
        yield f"Classes: {', '.join(map(_cell, names))}."


def _thresholds(scores: Mapping[str, Any]) -> str:
    found = [
        f"at least {row['threshold']:g}: {row['coverage']:.1f} % of the images, {row['accuracy']:.1f} % of them right"
        for row in scores.get("thresholds", [])
        if row["threshold"] and row["accuracy"] is not None
    ]
    by_threshold = f" By the probability of the answer: {'; '.join(found)}." if found else ""
    return f"It answers any image with one of its classes.{by_threshold}"


def _several(found: Mapping[str, Mapping[str, float | None]]) -> str:
    """The figures of each class of a network that may find several in an image."""
    head = ("class", *SEVERAL.values())
    rows = [head, ["---"] * len(head), *(map(_cell, row) for row in of_several(found))]
    listed = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"An image has every class whose probability reaches its threshold, or none of them.\n\n{listed}"


def _origin(config: Mapping[str, Any], about: Mapping[str, Any], data_state: Mapping[str, Any]) -> Iterator[str]:
    depends = data_state.get("depends_on", {})
    count = depends.get("training pictures")
    stored = depends.get("stored training images", "unchanged")
    changed = f" ({stored})" if stored != "unchanged" else ""
    counted = "" if count is None else f", {count:,} training images{changed}"
    yield f"- Data: {_cell(_data_name(config))}{counted}"
    if digest := depends.get("digest of the training pictures' names"):
        yield f"- Digest of the training images' names: `{digest}`"
    yield f"- Checkpoint: step {about['step']:,}, epoch {about['epoch'] + 1}"
    yield f"- Code when this card was written: {_code()}"


def _data_name(config: Mapping[str, Any]) -> str:
    """The data set's public name, or the last part of its path: the rest is private."""
    root = str(config["data"]["root"])
    try:
        public = isinstance(open_source(root), SplitSource)  # a set by its name, and no folder
    except UserError:
        public = False
    return root if public else root.rstrip("/").rpartition("/")[2]


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a reader may want to know."""
    trainer = {name: value for name, value in config.get("trainer", {}).items() if name in TRAINER}
    model = {name: value for name, value in config["model"].items() if name not in WEIGHTS}
    data = {name: value for name, value in config["data"].items() if name not in PLACES}
    kept = {"seed_everything": config.get("seed_everything"), "trainer": trainer, "model": model, "data": data}
    return _public(kept | {"ema": config.get("ema")})


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without settings that have no value, and those that are places on this machine."""
    return {
        name: _public(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value is not None and not (isinstance(value, str) and value.startswith(("/", "~")))
    }


def _code() -> str:
    """The commit of this package, or its version if it is in no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(cait.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a repository around an installed package is another's
        return f"commit `{git('rev-parse', 'HEAD')}`" + (", with changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"cait-lightning {cait.__version__}"


def _cell(text: str) -> str:
    """A name in Markdown, with all markup escaped."""
    shown = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#" else letter for letter in shown)
