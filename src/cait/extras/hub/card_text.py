"""The text of a model card: Markdown with the Hub's metadata in front, from what a run has written."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import cait
from cait.data.source import SplitSource, open_source
from cait.errors import UserError
from cait.extras.network_name import network_name
from cait.extras.scores import SEVERAL, of_several
from cait.plugins import Results

LEFT_OUT = {
    "data": (
        *("root", "data_dir", "labels", "val_list"),
        *("class_names", "cache_gb", "num_workers", "prefetch", "worker_start"),
    ),
    "model": ("weights", "weights_ema", "teacher_weights", "teacher_path", "mean", "std"),
}
"""Settings that are places on this machine, that change no result, or that stand in the card already."""
TRAINER = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
"""Settings of the Trainer that the card shows."""
WEAKEST = 5
"""So many of the classes with the lowest accuracy are named."""


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
    """The card, from the template card.jinja, with the metadata of the Hub in front.

    Args:
        repo: the model's name on the Hub, owner/name.
        scores: of the weights that go with the card, from evaluation.json.
        about: evaluation.json itself.
        config: the run's config.yaml.
        data_state: what the checkpoint says of the data.
        images: names of the files that lie beside the card.
        license: identifier of the Hub; None leaves it out.
        tables: what extras compare the run with.
    """
    per_class = [(share, name) for name, share in scores["per_class"].items() if share is not None and share < 100]
    several = of_several(scores["multi_label"]) if "multi_label" in scores else []
    variables: dict[str, Any] = {
        **dict(repo=repo, scores=scores, about=about, images=images, tables=tables, cell=_cell, table=_table),
        **dict(data=config["data"], model=config["model"], dataset=_data_name(config), code=_code()),
        "network": network_name(about["model"], config["model"].get("fields")),
        "results": _results(scores),
        "weakest": sorted(per_class)[:WEAKEST],
        "by_class": _table(("class", *SEVERAL.values()), several),
        "depends": data_state.get("depends_on", {}),
        "settings": yaml.safe_dump(_settings(config), sort_keys=False).strip(),
    }
    template = str(Path(__file__).with_name("card.jinja"))
    card = ModelCard.from_template(_metadata(repo, scores, config, license), template, **variables)
    return f"{card}\n"


def _metadata(repo: str, scores: Mapping[str, Any], config: Mapping[str, Any], license: str | None) -> ModelCardData:
    name, several = _data_name(config), "mAP" in scores
    result = EvalResult(
        task_type="image-classification",
        dataset_type=name.removeprefix("hfds/") if name.startswith("hfds/") else "imagefolder",
        dataset_name=name,
        dataset_split=config["data"].get("val_split"),
        metric_type="mAP" if several else "accuracy",
        metric_value=round(scores["mAP"] if several else scores["acc1"] / 100, 4),
        metric_name="mean average precision" if several else "top-1 accuracy",
    )
    return ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm"],
        license=license,
        metrics=["accuracy"],
        model_name=repo.partition("/")[2],
        eval_results=[result],
    )


def _results(scores: Mapping[str, Any]) -> str:
    """The table of the sets' figures."""
    sets = {"validation images": scores}
    sets |= {title: scores[key] for key, title in (("real", "ReaL"), ("v2", "ImageNet-V2")) if key in scores}
    sets |= scores.get("extra", {})
    columns = {"acc1": "top-1", "acc5": "top-5", "acc1_macro": "mean of the classes"}
    shares = {"mAP": "mean average precision", "f1": "F1"} if "multi_label" in scores else {}
    rows = []
    for title, found in sets.items():
        cells = [_shown(found.get(name), "{:.2f} %") for name in columns]
        cells += [_shown(found.get(name), "{:.4f}") for name in shares]
        rows.append((title, f"{found['images']:,}", *cells))
    return _table(("set", "images", *columns.values(), *shares.values()), rows)


def _shown(figure: float | None, form: str) -> str:
    return "" if figure is None else form.format(figure)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    shown = {part: {k: v for k, v in config[part].items() if k not in left_out} for part, left_out in LEFT_OUT.items()}
    return _public({"seed_everything": config.get("seed_everything"), "trainer": trainer, **shown})


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without settings that have no value, and those that are places on this machine."""
    return {
        name: _public(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value is not None and not (isinstance(value, str) and value.startswith(("/", "~")))
    }


def _code() -> str:
    """The commit of this package, or its version if it is in no repository."""
    folder, commit = Path(cait.__file__).parent, ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        # The last commit of this folder; none if the repository is another's, around an installed package.
        command = ["git", "-C", str(folder), "log", "-1", "--format=%H", "--", "."]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"commit `{commit}`" if commit else f"cait-lightning {cait.__version__}"


def _cell(text: str) -> str:
    """A name in Markdown, with all markup escaped."""
    shown = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#" else letter for letter in shown)
