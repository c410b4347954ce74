"""The weights that a run starts from, by default or by `--from FILE|timm|RUN|none`, and the settings for them."""

import multiprocessing
import sys
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from cait.cli import saved
from cait.cli.loading import checkpoint_of, from_checkpoint, tell_left_out
from cait.errors import UserError, to_type
from cait.extras.networks import preparation, timm_config
from cait.model.config import VARIANTS
from cait.model.weights import PUBLISHED, cached_weights
from cait.references import TIMM
from cait.settings import Settings

OF_IMAGES = ("img_size", "mean", "std", "interpolation", "crop_pct", "fit")
CHANNELS = "model.fields.in_chans"
INTERMEDIATES = "model.fields.intermediates"
"""Whether the head of a timm network sees all stages, a field that the extra `pretrained` adds."""
WAIT = 3.0
"""Seconds that the hub has to answer."""
ON_CPU, ON_GPU = "timm/tf_efficientnet_lite0.in1k", "xxs24"
"""Networks whose published weights a run starts from where nothing is named; the first was measured, on 2 cores."""


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and the settings that go with them."""

    name: str
    settings: Settings
    """Such as "model.weights", and those of its network. The size of the images only if a run of ours had it."""


def weights_of(source: str, given: Settings, has_gpu: bool) -> tuple[Weights | None, str]:
    """(the weights of a run, or None; the reason if there are none by default)

    They are those that `source` names, else those of the settings `given`, else those that are published. Raises
    UserError if those that are named cannot be had.
    """
    source = (
        source
        or str(given.get("model.weights") or "")
        or ("timm" if given.get("model.pretrained") else "")
    )
    if source == "timm":
        return published(given, has_gpu), ""
    if source not in ("", "none"):
        return from_file_or_run(source, str(given.get("model.name", "xxs24"))), ""
    if source == "none" or "model.pretrained" in given:
        return None, ""
    fields = {name for name in given if name.startswith("model.fields.")}
    if changing := fields - {CHANNELS, INTERMEDIATES}:
        return None, f"none, because --{min(changing)} changes the network"
    try:
        return published(given, has_gpu), ""
    except UserError as error:
        return (
            None,
            f"none, because {error}; {to_type('FROM=FILE', '--from FILE')} starts from a file",
        )


def beside_a_configuration(source: str) -> Settings:
    """The settings for the weights that `source` names, where a configuration says how images are prepared."""
    if source in ("", "none"):
        return {}
    return {"model.pretrained": True} if source == "timm" else from_file_or_run(source).settings


def from_file_or_run(source: str, name: str | None = None) -> Weights:
    """A run's weights with the settings of its network and images; or a file's.

    Images are prepared for a file as timm prepares them for the network `name`, if one is given.
    """
    path, folder = checkpoint_of(source, "start from")
    if folder and path.suffix == ".ckpt":
        return from_run(path, folder)
    settings: Settings = {"model.weights": source}
    if known := timm_config(name) if name else None:
        source += f", its images prepared as for timm's {entry(known)}"
    return Weights(source, settings | image_settings(known))


def from_run(path: Path, folder: Path) -> Weights:
    name = saved.run_settings(folder)["model"]["name"]
    if name not in VARIANTS and not name.startswith(TIMM):
        raise UserError(f"the network of {folder} is code, {name}: give --model.weights {path}")
    loaded = from_checkpoint(path, folder)  # it refuses one that is no network, or far too large
    tell_left_out(loaded.module, "forward")
    data = saved.data_settings(folder)
    settings: Settings = {"model.weights": str(path), "model.name": loaded.name}
    settings |= {
        f"model.fields.{key}": value
        for key, value in (loaded.module.hparams["fields"] or {}).items()
    }
    settings |= {f"data.{key}": data[key] for key in OF_IMAGES if key in data}
    return Weights(str(path), settings)


def published(given: Settings, has_gpu: bool) -> Weights:
    """timm's weights of the network that `given` names, or of the one that suits the machine, in the cache.

    Raises UserError if they cannot be had.
    """
    size = given.get("data.img_size", 224)
    usual = ON_GPU if has_gpu and size % 16 == 0 else ON_CPU  # CaiT cuts patches of 16 pixels
    name = str(given.get("model.name", usual))
    known = timm_config(name, size)
    if not known or not known.hf_hub_id:
        raise UserError(f"the Hugging Face hub has no weights of {name}")
    return Weights(
        f"timm's {entry(known)}, {fetched(known)}, license {known.license or 'unknown'}",
        {"model.name": name, "model.pretrained": True} | image_settings(known),
    )


def entry(known: Any) -> str:
    return ".".join(filter(None, (known.architecture, known.tag)))


def image_settings(known: Any) -> Settings:
    """How images are prepared for the weights of one of timm's configurations, as settings of the command line."""
    return {f"data.{name}": value for name, value in preparation(known).items()}


def fetched(known: Any) -> str:
    """Have weights in the Hugging Face cache, and say where they were.

    Raises UserError if the hub does not answer within `WAIT` seconds, or not with such weights.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if cached_weights(entry(known)):
        return "from the Hugging Face cache"
    address = hf_hub_url(known.hf_hub_id, PUBLISHED)
    try:
        # which is left alone when its time is up: looking up a name knows no limit
        with ThreadPool(1) as pool:
            file = pool.apply_async(get_hf_file_metadata, (address,), {"timeout": 2 * WAIT}).get(
                WAIT
            )
        origin = f"{(file.size or 0) / 1e6:,.1f} MB from {constants.ENDPOINT}"
        print(f"fetching timm's {entry(known)}, {origin}", file=sys.stderr, flush=True)
        hf_hub_download(known.hf_hub_id, PUBLISHED)
    except multiprocessing.TimeoutError as error:
        raise UserError(f"{constants.ENDPOINT} did not answer within {WAIT:g} seconds") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"the Hugging Face hub cannot be used: {reason}") from error
    return origin
