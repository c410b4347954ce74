"""Weights in: from the release, from timm, from safetensors, from a run of ours; other classes, other resolution."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cait.errors import UserError
from cait.model.config import CaiTConfig, variant_config

if TYPE_CHECKING:  # `create_model` loads published weights, so the network imports this
    from cait.model.cait import CaiT

StateDict = dict[str, Tensor]

ONLY_IN_TRAINING = (
    "attention_backend",
    "drop_path_mode",
    "layer_scale_init",
    "layer_scale_dist",
    "drop_path_rate",
    "drop_path_schedule",
)
"""Fields that a trained network's output does not depend on."""

FITTED = ("img_size", "num_classes", "distillation_token")
"""Fields in which a network may differ from that of the weights which it starts from."""

HEADS = ("head.", "head_dist.")


def read_state_dict(path: str | Path, ema: bool = False) -> StateDict:
    """Read the weights of a network under timm's names, whatever they are wrapped in.

    Knows the released `.pth` (`model`, keys behind `module.`), timm's training checkpoints
    (`state_dict`, `state_dict_ema`), bare state dicts, `.safetensors` and checkpoints of our runs
    (raw weights, or with `ema` their moving average). Loading never executes code.

    Raises:
        UserError: no such file, no weights in it, or no moving average where one is asked for.
    """
    return _state_dict(_read(path), path, ema)


def class_names(checkpoint: Any) -> list[str] | None:
    """Names of the classes in the content of a checkpoint of our runs; None in any other."""
    return checkpoint.get("ImageNetDataModule", {}).get("class_names") if isinstance(checkpoint, dict) else None


def _read(path: str | Path) -> Any:
    path = Path(path)
    if not path.is_file():
        raise UserError(f"the weights {path} do not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # The release keeps the command line of its training beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read as weights") from error


def _state_dict(content: Any, path: str | Path, ema: bool) -> StateDict:
    state = _unwrap(content, ema)
    if state is None:
        raise UserError(f"{path} holds no {'moving average of the ' if ema else ''}weights")
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{path} holds no weights")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _unwrap(content: Any, ema: bool) -> StateDict | None:
    if not isinstance(content, dict):
        return None
    if "pytorch-lightning_version" in content:
        if ema:
            return content.get("callbacks", {}).get("EMA") or None  # saved with the weights alone: no callbacks
        prefix = "model."
        return {k.removeprefix(prefix): v for k, v in content["state_dict"].items() if k.startswith(prefix)}
    for key in ("state_dict_ema", "model_ema") if ema else ("state_dict", "model"):
        if key in content:
            return content[key]
    return None if ema or not content else content


def load_weights(
    model: CaiT, path: str | Path, ema: bool = False, own_classes: Sequence[str] | None = None
) -> list[str]:
    """Load a file's weights into `model`, strictly but for what may rightly differ.

    Positions of another resolution are resized. Where `own_classes` names the model's classes, and the
    file is a checkpoint of our runs that knows some of them, the head's rows are put where those classes
    stand now, and only new classes are left as they are in `model`. Else a head of another number of
    classes is left whole, and so are a distillation token and its head that the file has not; those that
    the model has not are left out. Returns a line for each of these.

    Raises:
        UserError: the file cannot be used, or is of another network.
    """
    content = _read(path)
    state = _state_dict(content, path, ema)
    notes = _take_known_classes(model, state, class_names(content) or [], own_classes or [])
    return [*_load(model, state, str(path)), *notes]


def _take_known_classes(model: CaiT, state: StateDict, theirs: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Make the heads in `state` ones of our classes: their rows for those that they know, `model`'s for the others."""
    rows = {name: row for row, name in enumerate(theirs)}
    known = {row: rows[name] for row, name in enumerate(ours) if name in rows}
    own = model.state_dict()
    heads = [key for key in own if key.startswith(HEADS) and key in state]
    shapes = [tuple(side[key].shape) for side in (own, state) for key in heads]
    fitting = [(count, *own[key].shape[1:]) for count in (len(ours), len(theirs)) for key in heads]
    if not known or list(ours) == list(theirs) or shapes != fitting:
        return []  # nothing to sort; or another network, which `_load` tells
    for key in heads:
        head = own[key].clone()
        head[list(known)] = state[key][list(known.values())].to(head)
        state[key] = head
    anew = len(ours) - len(known)
    return [f"the head's rows of {len(known)} classes kept by name" + (f", {anew} new" if anew else "")]


def load_pretrained(model: CaiT, name: str) -> list[str]:
    """Load the weights that timm publishes of the paper's model `name`: the release's, distilled on ImageNet-1k.

    They are taken at the model's resolution where timm has them, else at the nearest, and fitted as
    in `load_weights`. Returns timm's name of them, then a line for each thing that was fitted.

    Raises:
        UserError: timm has none of this model, its fields were changed, or the hub cannot be reached.
    """
    import timm

    entries = {_resolution(entry): entry for entry in timm.list_models(f"cait_{name}_*", pretrained=True)}
    if not entries:
        published = dict.fromkeys(entry.split("_")[1] for entry in timm.list_models("cait_*", pretrained=True))
        raise UserError(f"timm has no weights of {name}, only of {', '.join(published)}")
    row = variant_config(name)
    for field in dataclasses.fields(CaiTConfig):
        ours, theirs = getattr(model.config, field.name), getattr(row, field.name)
        if ours != theirs and field.name not in (*FITTED, *ONLY_IN_TRAINING):
            raise UserError(f"the published weights of {name} are of {field.name} {theirs}, the model has {ours}")
    entry = entries[min(entries, key=lambda size: abs(size - model.config.img_size))]
    try:
        state = timm.create_model(entry, pretrained=True).state_dict()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the weights of timm's {entry} could not be had from the Hugging Face hub: {reason}"
        ) from error
    return [f"timm's {entry}", *_load(model, state, f"timm's {entry}")]


def _resolution(entry: str) -> int:
    """384 of "cait_xs24_384.fb_dist_in1k"."""
    return int(entry.split(".")[0].split("_")[-1])


def _load(model: CaiT, state: StateDict, source: str) -> list[str]:
    state, own = dict(state), model.state_dict()
    notes = _fit_distillation_token(model, state)
    theirs, ours = state.get("pos_embed"), own.get("pos_embed")
    # A class token with a position of its own (class_token_at 0) is no part of the grid.
    if theirs is not None and ours is not None and model.config.class_token_at != 0:
        widths_agree = theirs.shape[-1] == ours.shape[-1]  # else it is another network, which is told below
        if widths_agree and theirs.shape != ours.shape:
            try:
                state["pos_embed"] = resize_positions(theirs, model.config.num_patches)
            except UserError as error:
                raise UserError(f"{source} is of another network: {error}") from error
            notes.append(f"positions resized from {theirs.shape[1]} to {ours.shape[1]} patches")
    if "head.weight" in state and state["head.weight"].shape[0] != own["head.weight"].shape[0]:
        notes.append(f"the head's {state['head.weight'].shape[0]} classes left out; it starts anew")
        state.update({key: own[key] for key in own if key.startswith(HEADS)})
    for key in [*own, *state]:
        shapes = [tuple(side[key].shape) if key in side else "missing" for side in (own, state)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{source} is of another network: {key} is {shapes[1]} in it, {shapes[0]} in the model")
    model.load_state_dict(state)
    return notes


def _fit_distillation_token(model: CaiT, state: StateDict) -> list[str]:
    """Put `model`'s token and head into a `state` that has none, or take them out for a model without."""
    ours, theirs = model.config.distillation_token, "dist_token" in state
    if ours == theirs:
        return []
    own, parts = model.state_dict(), ("dist_token", "head_dist.weight", "head_dist.bias")
    for key in parts:
        state.pop(key, None)
    state.update({key: own[key] for key in parts if ours})
    after, before = own["pos_embed"], state.get("pos_embed")
    if model.config.class_token_at == 0 and before is not None and before.shape[::2] == after.shape[::2]:
        # Positions of the class token, of the distillation token where there is one, of the patches.
        kept = before[:, :1], after[:, 1 : 1 + ours].to(before), before[:, 1 + theirs :]
        state["pos_embed"] = torch.cat(kept, dim=1)
    return ["the distillation token and its head " + ("start anew" if ours else "left out")]


def resize_positions(pos_embed: Tensor, num_patches: int) -> Tensor:
    """Positions [1, N, d] of a square grid for another square grid, [1, num_patches, d].

    Bicubic, corners not aligned, no antialiasing: as the released code did for fine-tuning. timm's
    `resample_abs_pos_embed` antialiases by default.

    Raises:
        UserError: either number is not a square.
    """
    before, after = (int(n**0.5) for n in (pos_embed.shape[1], num_patches))
    if before**2 != pos_embed.shape[1] or after**2 != num_patches:
        raise UserError(f"positions can be resized between square grids, not {pos_embed.shape[1]} to {num_patches}")
    grid = pos_embed.float().reshape(1, before, before, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(after, after), mode="bicubic", align_corners=False)
    return grid.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)
