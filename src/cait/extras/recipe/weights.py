"""The weights that a run starts from, by default or by `--from FILE|timm|RUN|none`, and the settings for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cait.cli import saved
from cait.cli.loading import checkpoint_of
from cait.errors import UserError, to_type
from cait.model.config import TIMM, VARIANTS
from cait.model.weights import PUBLISHED, cached_weights, preparation, timm_config
from cait.run import rundir

OF_IMAGES = ("img_size", "mean", "std", "interpolation", "crop_pct", "fit")
WAIT = 3.0
"""Seconds that the hub has to answer."""
ON_CPU, ON_GPU = "timm/tf_efficientnet_lite0.in1k", "xxs24"
"""Networks whose published weights a run starts from where nothing is named; the first was measured, on 2 cores."""


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and the settings that go with them."""

    name: str
    settings: dict[str, Any]
    """Such as "model.weights", and those of its network. The size of the images only if a run of ours had it."""
    by_default: bool = False
    """Whether nobody asked for them."""


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
    if (config.get("ema") or {}).get("decay"):
        settings["model.weights_ema"] = True
    fields = model.get("fields") or {}
    trust.check_code(rundir.config(folder), fields, folder)
    settings |= {f"model.fields.{key}": value for key, value in fields.items()}
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(path), settings)


def default_weights(given: Mapping[str, Any], has_gpu: bool) -> tuple[Weights | None, str]:
    """The published weights that a run starts from unless the settings `given` name others; if none, the reason."""
    fields = {name for name in given if name.startswith("model.fields.")} - {"model.fields.in_chans"}
    if "model.pretrained" in given:
        return None, ""
    if fields:
        return None, f"none, because --{min(fields)} changes the network"
    try:
        return published(given, has_gpu, by_default=True), ""
    except UserError as error:
        return None, f"none, because {error}; {to_type('FROM=FILE', '--from FILE')} starts from a file"


def published(given: Mapping[str, Any], has_gpu: bool, by_default: bool = False) -> Weights:
    """timm's weights of the network that `given` names, or of the one that suits the machine, in the cache.

    Raises UserError if they cannot be had.
    """
    size = given.get("data.img_size", 224)
    usual = ON_GPU if has_gpu and size % 16 == 0 else ON_CPU  # CaiT cuts patches of 16 pixels
    name = str(given.get("model.name", usual))
    known = timm_config(name, size)
    if known is None or not known.has_weights:
        raise UserError(f"weights of {name} are published by nobody")
    came = fetched(name, known)
    settings = {"model.pretrained": True, **image_settings(known)}
    if "model.name" not in given:
        settings["model.name"] = name
    return Weights(f"timm's {entry(known)}, {came}, licence {known.license or 'unknown'}", settings, by_default)


def entry(known: Any) -> str:
    return ".".join(filter(None, (known.architecture, known.tag)))


def image_settings(known: Any) -> dict[str, Any]:
    """How images are prepared for the weights of one of timm's configurations, as settings of the command line."""
    found = preparation(known).items()
    return {f"data.{name}": [*value] if isinstance(value, tuple) else value for name, value in found}


def fetched(name: str, known: Any) -> str:
    """Have weights in the Hugging Face cache, and say where they were.

    Raises UserError if they are not on the hub, or it does not answer within `WAIT` seconds, or not with such weights.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if not known.hf_hub_id:
        raise UserError(f"weights of {name} are not on the Hugging Face hub; --model.pretrained true takes them")
    if cached_weights(entry(known)):
        return "from the Hugging Face cache"
    url = hf_hub_url(known.hf_hub_id, PUBLISHED)
    try:
        found = in_time(lambda: get_hf_file_metadata(url, timeout=2 * WAIT))
        came = f"{(found.size or 0) / 1e6:,.1f} MB from {constants.ENDPOINT}"
        print(f"fetching timm's {entry(known)}, {came}", file=sys.stderr, flush=True)
        hf_hub_download(known.hf_hub_id, PUBLISHED)
    except TimeoutError as error:
        raise UserError(f"{constants.ENDPOINT} did not answer within {WAIT:g} seconds") from error
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"the Hugging Face hub cannot be used: {why}") from error
    return came


def in_time(ask: Callable[[], Any]) -> Any:
    """What `ask` gives, in a thread that is left alone after `WAIT` seconds: looking up a name knows no limit."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(WAIT)
