"""Weights in: from the release, timm, safetensors or a run; for other classes, at another resolution."""

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cait import ckpt, disk
from cait.errors import UserError, abbreviate, one_line
from cait.model.config import VARIANTS
from cait.references import TIMM
from cait.settings import as_text

StateDict = dict[str, Tensor]

NAMED, AVERAGED = ("state_dict", "model", "model_state_dict", "student"), ("state_dict_ema", "model_ema")
"""Under what files keep weights, and their moving average, that they hold beside something else."""
PUBLISHED = "model.safetensors"
"""The file that timm takes from a repository of the Hugging Face hub."""
HEAD_ANEW = "the head starts anew"


def read_weights(path: str | Path, ema: bool | None = None) -> tuple[StateDict, list[str]]:
    """Read the weights of a network, or with `ema` their moving average, and the classes that a run of ours knows.

    With None those of a checkpoint of ours are the ones that chose it, see `cait.ckpt.uses_average`.

    Reads the released `.pth`, timm's training checkpoints, bare state dicts, `.safetensors`, checkpoints of our runs
    and of other scripts, with the names that they have there, and never executes code from them. Raises UserError
    otherwise.
    """
    content, classes = _read(path), None
    state = None if ema else content
    if isinstance(content, dict) and "pytorch-lightning_version" in content:
        disk.check_shape(content, {"state_dict": dict, "callbacks?": dict}, Path(path))
        state = ckpt.chosen_weights(content, path, ema) or content["state_dict"]
        classes = ckpt.class_names(content)
    elif isinstance(content, dict):
        named = [content[key] for key in (AVERAGED if ema else NAMED) if key in content]
        whole = [part for part in content.values() if _are_weights(part)]
        state = named[0] if named else whole[0] if len(whole) == 1 and not ema else state
    if not _are_weights(state):
        names = [f"{name!s:.60}" for name in content] if isinstance(content, dict) else []
        has = f"; it has {abbreviate(names)}" if names else ""
        raise UserError(f"{path} holds no {'moving average of the ' if ema else ''}weights{has}")
    return dict(state), classes or []  # type: ignore[arg-type]


def _are_weights(value: Any) -> bool:
    pairs = value.items() if isinstance(value, dict) else ()
    return bool(pairs) and all(isinstance(key, str) and isinstance(part, Tensor) for key, part in pairs)


def behind_prefix(state: StateDict, names: Collection[str], path: str | Path) -> StateDict:
    """The weights of a network that has these `names`, if all of them, or all in the file, are behind one prefix.

    It may be any, as "model._orig_mod.". Otherwise `state` as it is. Raises UserError if the names are behind several.
    """
    if all(name in state for name in names):
        return state
    prefixes = {key[: dot.end()] for key in state for dot in re.finditer(r"\.", key) if key[dot.end() :] in names}
    whole = [prefix for prefix in prefixes if all(f"{prefix}{name}" in state for name in names)]
    found = sorted(whole) or [prefix for prefix in prefixes if all(key.startswith(prefix) for key in state)]
    if not found:
        return state
    if len(found) > 1:
        raise UserError(f"{path} holds the weights behind each of {', '.join(found)}: save those of one alone")
    return {key.removeprefix(found[0]): value for key, value in state.items() if key.startswith(found[0])}


def _read(path: str | Path) -> Any:
    path = Path(path)
    if path.is_dir():
        held = ", ".join(file.name for file in sorted(path.iterdir()) if file.suffix in ckpt.WEIGHTS)
        remedy = f"as {held}" if held else "there is none; join the parts that FSDP or DeepSpeed have saved into one"
        raise UserError(f"{path} is a folder: name a file of weights in it, {remedy}")
    ckpt.check_weights(path)
    try:
        with disk.open_file(path) as file:  # a pipe would wait
            is_safetensors = file.read(9)[8:] == b"{"  # whatever it is called; the length of a header comes first
        if not is_safetensors:
            return ckpt.read(path)
        from safetensors.torch import load_file

        return load_file(path)
    except UserError:
        raise
    except Exception as error:
        why = "; it is JSON: name a file of tensors, and if there are several shards, join them into one"
        if path.suffix != ".json":  # timm's, or the index of a network in several files
            why = ckpt.why_unread(path, error)
        raise UserError(f"{path} cannot be read as weights{why}") from error


def load_weights(
    model: nn.Module, path: str | Path, ema: bool | None = None, own_classes: Sequence[str] | None = None
) -> list[str]:
    """Load a file's weights into `model`. They are finite; every name and shape must agree, with these exceptions:

    - All names may be behind one prefix; what is not behind it is left out.
    - Positions of another resolution are resized, in networks of timm by timm.
    - A convolution of three channels for another number: they are added up, or repeated, as timm does.
    - The head keeps the values that `model` has if the file has none, or one for another number of classes, or is
      a checkpoint of our runs whose classes are not `own_classes`; if only their order is another, its rows follow.

    Returns a line for each exception that was made. Raises UserError if the file is of no use; of weights of another
    network it names that one, if the file does.
    """
    state, saved_classes = read_weights(path, ema)
    own = model.state_dict()
    state = behind_prefix(state, own.keys() - {*classifier_keys(model)} or own.keys(), path)
    names = abbreviate([f"{name:.60}" for name in state])
    source = str(path) if own.keys() & state.keys() else f"{path}, with the names {names},"
    if saved_classes and own_classes and saved_classes != [*own_classes]:
        for key in classifier_keys(model):
            rows = state.pop(key, None)
            if rows is not None and {*saved_classes} == {*own_classes}:
                state[key] = rows[[saved_classes.index(name) for name in own_classes]]
    try:
        return _load(model, state, source)
    except UserError as error:
        raise UserError(f"{error}{_named(Path(path))}") from error


def _named(path: Path) -> str:
    """The end of a message: the network that a file of weights names, if it does."""
    if not isinstance(content := _read(path), dict):
        return ""
    own = content.get("hyper_parameters")
    if isinstance(own, dict) and isinstance(own.get("name"), str):
        fields = f" with --model.fields '{as_text(own['fields'])}'" if own.get("fields") else ""
        return f"; it is of {own['name']}{fields}"
    return f"; it is of {TIMM}{content['arch']}" if isinstance(content.get("arch"), str) else ""


def load_pretrained(model: nn.Module, name: str) -> list[str]:
    """Load the weights that timm publishes of the network `name`, one of the paper's or "timm/<name>".

    The paper's are the release's, distilled on ImageNet-1k, at the resolution nearest to the model's. What is in the
    Hugging Face cache is read without asking the hub. Raises UserError if timm has none of this network, or of other
    fields, or the hub cannot be reached.

    Returns timm's name of the weights, then a line for each thing that was fitted as in `load_weights`.
    """
    import timm

    entry = published_entry(name, getattr(model, "input_shape", (3, 224, 224))[-1])
    if entry is None:
        raise UserError(f"nobody publishes weights of {name}; start from a file with --model.weights")
    kept = cached_weights(entry)
    try:
        overlay = {"file": kept} if kept else None
        state = timm.create_model(entry, pretrained=True, pretrained_cfg_overlay=overlay).state_dict()
    except Exception as error:
        raise UserError(f"timm's {entry} could not be fetched from the Hugging Face hub: {one_line(error)}") from error
    return [f"timm's {entry}", *_load(model, state, f"timm's {entry}")]


def cached_weights(entry: str) -> str | None:
    """The file with the weights of timm's `entry` in the Hugging Face cache; None if it is not there."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    known = timm.get_pretrained_cfg(entry)
    found = try_to_load_from_cache(known.hf_hub_id, PUBLISHED) if known and known.hf_hub_id else None
    return found if isinstance(found, str) else None


def published_entry(name: str, img_size: int) -> str | None:
    """timm's entry with weights of the network `name`, of the paper's models at the resolution nearest to `img_size`.

    None if there are no such weights.
    """
    if name not in VARIANTS:
        return name.removeprefix(TIMM) if name.startswith(TIMM) else None
    import timm

    entries = timm.list_models(f"cait_{name}_*", pretrained=True)  # as "cait_xs24_384.fb_dist_in1k"
    return min(entries, key=lambda entry: abs(timm.get_pretrained_cfg(entry).input_size[-1] - img_size), default=None)


def timm_config(name: str, img_size: int = 224) -> Any:
    """timm's configuration of the network `name` and of its published weights; None if it knows no such network."""
    import timm

    entry = published_entry(name, img_size)
    return timm.get_pretrained_cfg(entry) if entry else None


def preparation(known: Any) -> dict[str, Any]:
    """The settings of a data module that suit the weights of one of timm's configurations, or none for None."""
    return {name: getattr(known, name) for name in ("mean", "std", "interpolation", "crop_pct")} if known else {}


def _load(model: nn.Module, state: StateDict, source: str) -> list[str]:
    from timm.models import adapt_input_conv

    weights, heads = model.state_dict(), classifier_keys(model)
    try:
        notes = _fit(model, state)
        if any(key not in state or state[key].shape != weights[key].shape for key in heads):
            notes.append(HEAD_ANEW)
            state.update({key: weights[key] for key in heads})
        for key in state.keys() & weights.keys():
            is_of_colours = state[key].ndim == weights[key].ndim == 4 and state[key].shape[1] == 3
            if is_of_colours and (channels := weights[key].shape[1]) != 3:
                state[key] = adapt_input_conv(channels, state[key])
                how = "added up for gray images" if channels == 1 else f"repeated for {channels}"
                notes.append(f"the three channels of {key} {how}")
        if differs := difference(weights, state):
            raise UserError(differs)
    except UserError as error:
        raise UserError(f"{source} is of another network: {error}") from error
    for key, own in weights.items():
        if not state[key].to(own.dtype).isfinite().all() and own.isfinite().all():
            raise UserError(f"{source} cannot be used: {key} is not finite, it holds NaN or infinity")
    model.load_state_dict(state)
    return notes


def difference(weights: dict[str, Tensor], state: dict[str, Tensor]) -> str | None:
    """The first name, shape or kind of number in which `state` is not that of the model, in words."""
    for key in [*weights, *state]:
        own, theirs = (held.get(key) for held in (weights, state))
        if own is None or theirs is None or own.shape != theirs.shape:
            found, wanted = ("missing" if part is None else tuple(part.shape) for part in (theirs, own))
        elif own.is_floating_point() > theirs.is_floating_point():  # quantized, as int8
            found, wanted = (f"of the type {part.dtype}".replace("torch.", "") for part in (theirs, own))
        elif theirs.is_meta or theirs.layout != torch.strided:
            found, wanted = ("without values, as on the device meta" if theirs.is_meta else "sparse", "whole")
        else:
            continue
        return f"{key} is {found} in it, {wanted} in the model"
    return None


def classifiers(network: Any) -> list[Any]:
    """The layers that give the logits: `get_classifier()`'s, of timm's distilled DeiT two, or the last linear."""
    found = network.get_classifier() if hasattr(network, "get_classifier") else None
    if found is None:
        return [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1:]
    layers = [*found] if isinstance(found, tuple | list) else [found]
    if odd := [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]:
        raise UserError(f"get_classifier() of {type(network).__name__} must return a layer, not {odd[0]}")
    return layers


def classifier_keys(network: Any) -> list[str]:
    """Names of the parameters whose rows are the classes."""
    parameters = {id(parameter) for layer in classifiers(network) for parameter in layer.parameters()}
    return [name for name, parameter in network.named_parameters() if id(parameter) in parameters]


def lower_keys(network: Any, share: float) -> set[str]:
    """Names of the parameters in this share of the layers, from the images on, that a `group_matcher` tells apart."""
    from timm.models import group_parameters

    layers = group_parameters(network, network.group_matcher(coarse=False), reverse=True)
    return {key for key, number in layers.items() if number < share * max(layers.values())}


def _fit(network: Any, state: StateDict) -> list[str]:
    """Fit weights of another resolution to a network of the same kind, in place; a line for each change."""
    if hasattr(network, "fit_weights"):
        return network.fit_weights(state)
    places = [kind.__module__ for kind in type(network).__mro__ if kind.__module__.startswith("timm.models.")]
    if not places or not hasattr(sys.modules[places[0]], "checkpoint_filter_fn"):
        return []
    with torch.no_grad():
        fitted = sys.modules[places[0]].checkpoint_filter_fn(dict(state), network)
    notes = [f"{key} fitted by timm" for key in fitted if key in state and fitted[key].shape != state[key].shape]
    state.clear()
    state.update(fitted)
    return notes
