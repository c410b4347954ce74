"""The weights that a run starts from, by default or by `--from FILE|timm|RUN|none`, and the settings for them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from cait import ckpt
from cait.cli import saved
from cait.cli.loading import checkpoint_of
from cait.errors import UserError, one_line, to_type
from cait.extras.recipe.anatomy import without_weights
from cait.model.config import TIMM, VARIANTS
from cait.model.weights import PUBLISHED, cached_weights, load_weights, preparation, timm_config
from cait.run import rundir

Result = TypeVar("Result")

OF_IMAGES = ("img_size", "mean", "std", "interpolation", "crop_pct", "fit")
WAIT = 3.0
"""Seconds that the hub has to answer."""
ON_CPU, ON_GPU, LARGER = "timm/tf_efficientnet_lite0.in1k", "xxs24", "s24"
"""Networks whose published weights a run starts from where nothing is named; the first was measured, on 2 cores."""
LONG, PER_MINUTE = 10, 600
"""A GPU takes the larger one from this many minutes on, and with fewer images for each of them: ten epochs then fit
at 100 images a second."""


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and the settings that go with them."""

    name: str
    settings: dict[str, Any]
    """Such as "model.weights", and those of its network. The size of the images only if a run of ours had it."""
    by_default: bool = False
    """Whether nobody asked for them."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise UserError if weights are of another network than the settings name, before a trial of it takes time."""
    path, name = settings.get("model.weights"), settings.get("model.name", "xxs24")
    if path is None or (network := without_weights(settings, settings.get("data.img_size", 224))) is None:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that nothing is copied
            load_weights(network, path, settings.get("model.weights_ema", False))
    except UserError as error:
        raise UserError(f"{error}; --model.name says which network to train, here {name}") from error


def initial_weights(source: str, name: str | None = None) -> Weights:
    """The weights that `source` names: "timm", a file, or a run of this project.

    A run gives the moving average of its weights if it kept one, and its network's and images' settings. A file gives
    what timm says of images for the network `name`. Raises UserError if there are no such weights.
    """
    if source == "timm":
        return Weights("timm's, as published", {"model.pretrained": True})
    from cait.guards import trust

    path, folder = checkpoint_of(source, "start from")
    if folder is None or path.suffix != ".ckpt":
        known = timm_config(name) if name else None
        prepared = f", its images prepared as for timm's {entry(known)}" if known else ""
        return Weights(source + prepared, {"model.weights": source} | image_settings(known))
    config = saved.of_run(folder)
    model, data, name = config["model"], saved.data_settings(folder), config["model"]["name"]
    if name not in VARIANTS and not name.startswith(TIMM):
        raise UserError(f"the network of {folder} is code, {name}: give --model.weights {path}")
    settings: dict[str, Any] = {"model.weights": str(path), "model.name": name}
    if ckpt.average(ckpt.read_checkpoint(path)):
        settings["model.weights_ema"] = True
    fields = model.get("fields") or {}
    trust.check_code(rundir.config(folder), fields, folder)
    settings |= {f"model.fields.{key}": value for key, value in fields.items()}
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(path), settings)


def default_weights(given: Mapping[str, Any], images: int, minutes: float, has_gpu: bool) -> tuple[Weights | None, str]:
    """The published weights that a run starts from unless the settings `given` name others; if none, the reason."""
    if given.keys() & {"model.weights", "model.pretrained"}:
        return None, ""
    fields = {name for name in given if name.startswith("model.fields.")} - {"model.fields.in_chans"}
    if fields:
        return None, f"none, because --{min(fields)} changes the network"
    try:
        return published(given, images, minutes, has_gpu, by_default=True), ""
    except UserError as error:
        return None, f"none, because {error}"


def published(
    given: Mapping[str, Any], images: int, minutes: float, has_gpu: bool, by_default: bool = False
) -> Weights:
    """timm's weights of the network that `given` names, or of the one that suits the machine, in the cache.

    By default fetching them may take a third of the minutes. Raises UserError if they cannot be had.
    """
    size = given.get("data.img_size")
    size = size if isinstance(size, int) else 224
    name, why = (str(given["model.name"]), "") if "model.name" in given else suitable(size, images, minutes, has_gpu)
    known = timm_config(name, size)
    try:
        if known is None or not known.has_weights:
            raise UserError(f"weights of {name} are published by nobody")
        came = fetched(name, known, 20 * minutes if by_default else None)
    except UserError as error:
        file = to_type("FROM=FILE", "--from FILE")
        raise UserError(f"{error}; {file} starts from a file") from error
    settings = {"model.pretrained": True, **image_settings(known)}
    if "model.name" not in given:
        settings["model.name"] = name
    about = f"timm's {entry(known)}{why}; {came}, licence {known.license or 'unknown'}"
    return Weights(about, settings, by_default)


def suitable(size: int, images: int, minutes: float, has_gpu: bool) -> tuple[str, str]:
    """The network whose published weights suit the machine, and why."""
    if not has_gpu:
        return ON_CPU, ", small enough for a CPU"
    if size % 16:  # of the patches
        return ON_CPU, ", which takes any size of images"
    if minutes >= LONG and images < PER_MINUTE * minutes:
        return LARGER, ", because there is time for it"
    return ON_GPU, ", the smallest CaiT, on a GPU"


def entry(known: Any) -> str:
    return ".".join(filter(None, (known.architecture, known.tag)))


def image_settings(known: Any) -> dict[str, Any]:
    """How images are prepared for the weights of one of timm's configurations, as settings of the command line."""
    found = preparation(known).items()
    return {f"data.{name}": [*value] if isinstance(value, tuple) else value for name, value in found}


def fetched(name: str, known: Any, limit: float | None) -> str:
    """Have weights in the Hugging Face cache, at most `limit` seconds of downloading later, and say where they were.

    Raises UserError if they are not on the hub, or it does not answer within `WAIT` seconds, or not with such weights.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from safetensors import safe_open

    if not known.hf_hub_id:
        raise UserError(f"weights of {name} are not on the Hugging Face hub; --model.pretrained true takes them")
    came, path = "from the Hugging Face cache", cached_weights(entry(known))
    if path is None:
        url = hf_hub_url(known.hf_hub_id, PUBLISHED)
        found = within(
            WAIT, lambda: get_hf_file_metadata(url, timeout=2 * WAIT), f"{constants.ENDPOINT} did not answer"
        )
        came = f"{(found.size or 0) / 1e6:,.1f} MB from {constants.ENDPOINT}"
        print(f"fetching timm's {entry(known)}, {came}", file=sys.stderr, flush=True)
        path = within(limit, lambda: hf_hub_download(known.hf_hub_id, PUBLISHED), "the download did not end")
    try:
        with safe_open(path, "pt"):
            return came
    except Exception as error:
        raise UserError(f"{path} is damaged, {one_line(error)}: remove it") from error


def within(seconds: float | None, make: Callable[[], Result], late: str) -> Result:
    """What `make` gives, in a thread that is left alone after so many seconds: looking up a name knows no limit.

    Raises UserError if it fails or is `late`.
    """
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(make())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise UserError(f"{late} within {seconds:g} seconds") from error
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"the Hugging Face hub cannot be used: {why}") from error
