"""`cait card`: write a model card from what a run has written, and timm's files beside it."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cait
from cait import ckpt, disk, plugins
from cait.cli import saved
from cait.cli.options import Options
from cait.errors import UserError, say
from cait.extras.display import written
from cait.extras.publish import SHARED_FIELDS
from cait.model.config import VARIANTS
from cait.references import TIMM
from cait.run import rundir
from cait.run.program import Program
from cait.settings import Settings, group

WHAT = """\
Write a model card of a run, README.md as the Hugging Face Hub shows it, with the figures of evaluation.json, the
settings, the curves and how to use the model. With OWNER/NAME timm's files are written beside it; then
`hf upload OWNER/NAME FOLDER` puts all on the Hub."""
README = "README.md"
CURVES = "curves.png"
WORD = re.compile(r"(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z][\w./-]*", re.ASCII)
"""A text that needs no quotes in YAML."""
Content = Mapping[str, Any]
"""What a file holds."""
PLACES = ("root", "data_dir", "copies_dir", "labels", "val_list", "weights", "teacher_path")
"""Settings that are places on this machine."""
TRAINER = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
"""Settings of the Trainer that the card shows."""
FIGURES = {
    "acc1": ("top-1", "{:.2f} %"),
    "acc5": ("top-5", "{:.2f} %"),
    "acc1_macro": ("mean of the classes", "{:.2f} %"),
    "mAP": ("mean average precision", "{:.4f}"),
    "f1": ("F1", "{:.4f}"),
}
"""Title and form of each figure."""


def card(arguments: list[str], program: Program) -> None:
    """Write the card of a run, and for a model of the Hub timm's files beside it."""
    options = Options("card", WHAT)
    options.add_argument("run", metavar="NAME", help="the run's folder in logs/")
    options.add_argument(
        "repo", metavar="OWNER/NAME", nargs="?", help="the model's name on the Hub"
    )
    options.add_weights()
    options.add_argument(
        "--license", metavar="ID", help="the Hub's identifier, as apache-2.0; default none is named"
    )
    args = options.parse_args(arguments)
    folder = rundir.folder_of(args.run)
    if args.repo and args.repo.count("/") != 1:
        raise UserError(f"name the model as OWNER/NAME, not {args.repo}")
    output = folder / "card"
    _write(folder, output, args, program)
    for path in sorted(output.iterdir()):
        say(os.path.relpath(path))
    if args.repo:
        print(f"next: hf upload {args.repo} {os.path.relpath(output)}")


def _write(folder: Path, output: Path, given: argparse.Namespace, program: Program) -> None:
    """Write the card of a run, with its curves, and timm's files for a model of the Hub, into the folder `output`.

    Raises what `scores.read` does, and UserError if timm does not know the network.
    """
    from cait.extras import curves, plots, scores

    checkpoint = rundir.best_checkpoint(folder, "describe")
    about = scores.read(folder, checkpoint, program.command("eval", folder))
    content = ckpt.read_checkpoint(checkpoint)
    scored = about.get("ema" if ckpt.uses_average(content, given.ema) else "raw")
    if scored is None:
        raise UserError(f"{folder} has no scores of a moving average: the run kept none")
    state = ckpt.data_state(content) or {}
    if not {"acc1", "mAP"} & scored.keys():
        raise UserError(
            f"{folder / rundir.EVALUATION} has no accuracy to show: the network's answers are not finite"
        )
    images = state.get("depends_on", {}).get("training pictures")
    # as the Hub allows
    repo = given.repo or f"OWNER/{re.sub(r'[^A-Za-z0-9_.-]+', '-', folder.name)}"
    config = saved.run_settings(folder)
    check_settings(config)
    about["is_own"] = state.get("preprocessing", {}) is None
    _, *about["left_out"] = content.get(ckpt.MODULE) or [""]
    is_timms = not about["left_out"] and _is_timms(config["model"])
    about["is_timms"] = bool(given.repo) or is_timms
    card = text(repo, scored, about, config, images, given.license, plugins.results(folder))
    drawn = curves.draw({folder.name: curves.read(folder)})
    for name in ("config.json", "model.safetensors"):
        disk.remove(output / name)  # the weights may be older; files of others stay
    if given.repo:
        from cait.extras.publish import exporting

        exporting.write(exporting.opened(str(folder), given, program)[0], "timm", output)
    plots.write(drawn, output / CURVES)
    with disk.atomic_write(output / README) as beside:
        beside.write_text(card, encoding="utf-8")


def _is_timms(model: Content) -> bool:
    """Whether timm knows the network of a run by its settings."""
    name = model["name"]
    fields = {field for field, value in (model.get("fields") or {}).items() if value}
    if name.startswith(TIMM):
        return fields.isdisjoint(plugins.by_name("TIMM_FIELDS"))
    return name in VARIANTS and fields <= {*SHARED_FIELDS}


def check_settings(config: Content) -> None:
    """Raise UserError if a setting of a run has a value of another type: the card has them in its code."""
    from cait.data.datamodule import DataSettings
    from cait.train.module import ModuleSettings

    group(ModuleSettings, config["model"])
    channels = (config["model"].get("fields") or {}).get("in_chans", 3)
    group(DataSettings, config["data"] | {"in_chans": channels})


def text(
    repo: str,
    scores: Content,
    about: Content,
    config: Content,
    images: Any,
    license: str | None,
    tables: Any,
) -> str:
    """The card by card.jinja: `about` is evaluation.json, `scores` its part, `images` are those that trained."""
    from huggingface_hub import ModelCard

    from cait.extras.display import network_name
    from cait.extras.scores import WEAKEST, weakest

    card = ModelCard.from_template(
        _metadata(repo, scores, config, license),
        str(Path(__file__).with_name("card.jinja")),
        repo=repo,
        scores=scores,
        about=about,
        images=images,
        tables=tables,
        table=_table,
        written=written,
        data=config["data"],
        model=config["model"],
        dataset=_data_name(config),
        version=cait.__version__,
        network=network_name(about["model"], config["model"].get("fields")),
        results=_results(scores),
        weakest=weakest(scores["per_class"])[:WEAKEST],
        settings="\n".join(_yaml_lines(_settings(config))),
    )
    return f"{card}\n"


def _metadata(repo: str, scores: Content, config: Content, license: str | None) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    name = written(_data_name(config), "terminal")
    several = "mAP" in scores
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


def _results(scores: Content) -> str:
    sets = {"validation images": scores}
    if "real" in scores:
        sets["ReaL"] = scores["real"]
    sets |= scores.get("extra", {})
    shown = {name: look for name, look in FIGURES.items() if name in scores}
    rows = []
    for title, figures in sets.items():
        cells = [title, f"{figures['images']:,}"]
        for name, (_, form) in shown.items():
            value = figures.get(name)
            cells.append("" if value is None else form.format(value))
        rows.append(cells)
    return _table(["set", "images", *(title for title, _ in shown.values())], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([written(cell, "markdown") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _data_name(config: Content) -> str:
    """The public name of a data set, or the last part of its path: the rest is private."""
    root = str(config["data"]["root"])
    return root if root.startswith(("torch/", "hfds/")) else root.rstrip("/").rpartition("/")[2]


def _settings(config: Content) -> Settings:
    settings = {name: config.get(name) for name in ("seed_everything", "model", "data")}
    trainer = config.get("trainer") or {}
    settings["trainer"] = {name: trainer.get(name) for name in TRAINER}
    return _public(settings)


def _public(settings: Content) -> Settings:
    """Without settings that have no value, and those that are places on this machine."""
    return {
        name: _public(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in PLACES and value is not None and not str(value).startswith(("/", "~"))
    }


def _yaml_lines(settings: Content, indent: str = "") -> Iterator[str]:
    """Settings as YAML, each on one line: a text of many lines could look like something else."""
    for name, value in settings.items():
        shown = f"{indent}{_yaml_value(name)}:"
        if isinstance(value, dict) and value:
            yield shown
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{shown} {_yaml_value(value)}"


def _yaml_value(value: Any) -> str:
    import yaml

    if isinstance(value, float):
        return yaml.safe_dump(value).splitlines()[0]  # JSON's 1e-05 is a text in YAML
    is_word = isinstance(value, str) and WORD.fullmatch(value)
    return value if is_word else written(value, "json")
