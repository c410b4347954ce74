"""Weights in: from the release, timm, safetensors or a run; for other classes, at another resolution."""

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

WEIGHTS = ("state_dict", "model", "model_state_dict", "student")
AVERAGES = ("state_dict_ema", "model_ema")
"""Keys of the weights, and of their moving average, in files that hold something else too."""
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
    content = _read(Path(path))
    classes = None
    if isinstance(content, dict) and "pytorch-lightning_version" in content:
        disk.check_shape(content, {"state_dict": dict, "callbacks?": dict}, Path(path))
        state = ckpt.chosen_weights(content, path, ema) or content["state_dict"]
        classes = ckpt.class_names(content)
    else:
        state = _find_weights(content, ema)
    if _are_weights(state):
        return dict(state), classes or []
    what = "moving average of the weights" if ema else "weights"
    has = f"; it has {_names(content)}" if isinstance(content, dict) and content else ""
    raise UserError(f"{path} holds no {what}{has}")


def _names(content: dict[Any, Any]) -> str:
    """The first keys of a file for a message."""
    return abbreviate([f"{name!s:.60}" for name in content])


def _find_weights(content: Any, ema: bool | None) -> Any:
    """What may be the weights in somebody else's file: what has a known key, the only state dict, or all of it."""
    if not isinstance(content, dict):
        return None
    for key in AVERAGES if ema else WEIGHTS:
        if key in content:
            return content[key]
    if ema:
        return None
    states = [value for value in content.values() if _are_weights(value)]
    return states[0] if len(states) == 1 else content


def _are_weights(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())


def behind_prefix(state: StateDict, names: Collection[str], path: str | Path) -> StateDict:
    """The weights of a network that has these `names`, if its file has them behind a prefix, as "model._orig_mod.".

    Otherwise `state` as it is. Raises UserError if the names are behind several.
    """
    if all(name in state for name in names):
        return state
    longest = max(sorted(names), key=len)
    some = sorted(key.removesuffix(longest) for key in state if key.endswith(f".{longest}"))
    prefixes = [
        prefix for prefix in some if all(f"{prefix}{name}" in state for name in names)
    ] or some
    if not prefixes:
        return state
    if len(prefixes) > 1:
        raise UserError(
            f"{path} holds the weights behind each of {', '.join(prefixes)}: save those of one alone"
        )
    prefix = prefixes[0]
    return {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }


def _read(path: Path) -> Any:
    """The content of a file of weights. Raises UserError if there is none that can be read."""
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.suffix in ckpt.WEIGHTS)
        remedy = "there is none; join the parts that FSDP or DeepSpeed have saved into one"
        if files:
            remedy = f"as {', '.join(files)}"
        raise UserError(f"{path} is a folder: name a file of weights in it, {remedy}")
    ckpt.check_weights(path)
    try:
        with disk.open_file(path) as file:  # a pipe would wait
            # whatever it is called; the length of a header comes first
            is_safetensors = file.read(9)[8:] == b"{"
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
    model: nn.Module,
    path: str | Path,
    ema: bool | None = None,
    own_classes: Sequence[str] | None = None,
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
    state, classes = read_weights(path, ema)
    names = model.state_dict().keys()
    heads = classifier_keys(model)
    state = behind_prefix(state, names - {*heads} or names, path)
    if classes and own_classes:
        for key in heads:
            rows = state.pop(key, None)
            # else the head is for other classes
            if rows is not None and {*classes} == {*own_classes}:
                state[key] = rows[[classes.index(name) for name in own_classes]]
    source = f"{path}, with the names {_names(state)}," if names.isdisjoint(state) else str(path)
    try:
        return _load(model, state, source)
    except UserError as error:
        raise UserError(f"{error}{_network_named(_read(Path(path)))}") from error


def _network_named(content: Any) -> str:
    """The end of a message: the network that a file of weights names; empty if it names none."""
    match content:
        case {"hyper_parameters": {"name": str(name), "fields": dict(fields)}} if fields:
            return f"; it is of {name} with --model.fields '{as_text(fields)}'"
        case {"hyper_parameters": {"name": str(name)}}:
            return f"; it is of {name}"
        case {"arch": str(name)}:
            return f"; it is of {TIMM}{name}"
    return ""


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
        raise UserError(
            f"nobody publishes weights of {name}; start from a file with --model.weights"
        )
    cached = {"file": cached_weights(entry)}  # without a file timm asks the hub
    try:
        state = timm.create_model(
            entry, pretrained=True, pretrained_cfg_overlay=cached
        ).state_dict()
    except Exception as error:
        raise UserError(
            f"timm's {entry} could not be fetched from the Hugging Face hub: {one_line(error)}"
        ) from error
    return [f"timm's {entry}", *_load(model, state, f"timm's {entry}")]


def cached_weights(entry: str) -> str | None:
    """The file with the weights of timm's `entry` in the Hugging Face cache; None if it is not there."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(entry)
    if config is None or not config.hf_hub_id:
        return None
    path = try_to_load_from_cache(config.hf_hub_id, PUBLISHED)
    return path if isinstance(path, str) else None


def published_entry(name: str, img_size: int) -> str | None:
    """timm's entry with weights of the network `name`, of the paper's models at the resolution nearest to `img_size`.

    None if there are no such weights.
    """
    if name.startswith(TIMM):
        return name.removeprefix(TIMM)
    if name not in VARIANTS:
        return None
    import timm

    def distance(entry: str) -> int:
        return abs(timm.get_pretrained_cfg(entry).input_size[-1] - img_size)

    return min(timm.list_models(f"cait_{name}_*", pretrained=True), key=distance, default=None)


def _load(model: nn.Module, state: StateDict, source: str) -> list[str]:
    """Load weights that bear the model's names, or that it can fit; see `load_weights`. Changes `state`."""
    weights = model.state_dict()
    heads = classifier_keys(model)
    try:
        notes = _fit(model, state)
        if any(key not in state or state[key].shape != weights[key].shape for key in heads):
            notes.append(HEAD_ANEW)
            state.update({key: weights[key] for key in heads})
        notes += _fit_channels(state, weights)
        problem = difference(weights, state)
        if problem:
            raise UserError(problem)
    except UserError as error:
        raise UserError(f"{source} is of another network: {error}") from error
    for key, value in weights.items():
        if value.isfinite().all() and not state[key].to(value.dtype).isfinite().all():
            raise UserError(
                f"{source} cannot be used: {key} is not finite, it holds NaN or infinity"
            )
    model.load_state_dict(state)
    return notes


def _fit(network: Any, state: StateDict) -> list[str]:
    """Fit weights of another resolution to a network of the same kind, in place; a line for each change."""
    if hasattr(network, "fit_weights"):
        return network.fit_weights(state)
    modules = [
        cls.__module__ for cls in type(network).__mro__ if cls.__module__.startswith("timm.models.")
    ]
    fit = getattr(sys.modules[modules[0]], "checkpoint_filter_fn", None) if modules else None
    if fit is None:
        return []
    with torch.no_grad():
        fitted = fit(dict(state), network)
    notes = [
        f"{key} fitted by timm"
        for key in fitted
        if key in state and fitted[key].shape != state[key].shape
    ]
    state.clear()
    state.update(fitted)
    return notes


def _fit_channels(state: StateDict, weights: StateDict) -> list[str]:
    """Fit convolutions of three channels to those of another number, in place; a line for each."""
    from timm.models import adapt_input_conv

    notes = []
    for key, ours in weights.items():
        theirs = state.get(key, ours)
        if ours.ndim == theirs.ndim == 4 and theirs.shape[1] == 3 != ours.shape[1]:
            channels = ours.shape[1]
            state[key] = adapt_input_conv(channels, theirs)
            change = "added up for gray images" if channels == 1 else f"repeated for {channels}"
            notes.append(f"the three channels of {key} {change}")
    return notes


def difference(weights: StateDict, state: StateDict) -> str | None:
    """The first name, shape or kind of number in which `state` is not that of the model, in words."""
    for key in [*weights, *state]:
        ours = weights.get(key)
        theirs = state.get(key)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return f"{key} is {_shape(theirs)} in it, {_shape(ours)} in the model"
        if ours.is_floating_point() and not theirs.is_floating_point():  # quantized, as int8
            types = (
                f"{key} is of the type {theirs.dtype} in it, of the type {ours.dtype} in the model"
            )
            return types.replace("torch.", "")
        if theirs.is_meta:
            return f"{key} is without values, as on the device meta in it, whole in the model"
        if theirs.layout != torch.strided:
            return f"{key} is sparse in it, whole in the model"
    return None


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape))


def classifiers(network: Any) -> list[Any]:
    """The layers that give the logits: `get_classifier()`'s, of timm's distilled DeiT two, or the last linear."""
    head = network.get_classifier() if hasattr(network, "get_classifier") else None
    if head is None:
        return [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1:]
    layers = [*head] if isinstance(head, tuple | list) else [head]
    others = [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]
    if others:
        raise UserError(
            f"get_classifier() of {type(network).__name__} must return a layer, not {others[0]}"
        )
    return layers


def classifier_keys(network: Any) -> list[str]:
    """Names of the parameters whose rows are the classes."""
    parameters = {
        id(parameter) for layer in classifiers(network) for parameter in layer.parameters()
    }
    return [name for name, parameter in network.named_parameters() if id(parameter) in parameters]
