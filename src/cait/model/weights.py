"""Weights in: from the release, from timm, from safetensors, from a run of ours; other classes, other resolution."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cait.errors import UserError
from cait.model.cait import CaiT

StateDict = dict[str, Tensor]


def read_state_dict(path: str | Path, ema: bool = False) -> StateDict:
    """Read the weights of a network under timm's names, whatever they are wrapped in.

    Knows the released `.pth` (`model`, keys behind `module.`), timm's training checkpoints
    (`state_dict`, `state_dict_ema`), bare state dicts, `.safetensors` and checkpoints of our runs
    (raw weights, or with `ema` their moving average). Loading never executes code.

    Raises:
        UserError: no such file, no weights in it, or no moving average where one is asked for.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"the weights {path} do not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            # The release keeps the command line of its training beside the weights.
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} cannot be read as weights") from error
    state = _unwrap(content, ema)
    if state is None:
        raise UserError(f"{path} holds no {'moving average of the ' if ema else ''}weights")
    state = {key.removeprefix("module."): value for key, value in state.items()}
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} holds no weights")
    return state


def _unwrap(content: Any, ema: bool) -> StateDict | None:
    if not isinstance(content, dict):
        return None
    if "pytorch-lightning_version" in content:
        if ema:
            return content["callbacks"].get("EMA") or None
        prefix = "model."
        return {k.removeprefix(prefix): v for k, v in content["state_dict"].items() if k.startswith(prefix)}
    for key in ("state_dict_ema", "model_ema") if ema else ("state_dict", "model"):
        if key in content:
            return content[key]
    return None if ema or not content else content


def load_weights(model: CaiT, path: str | Path, ema: bool = False) -> list[str]:
    """Load a file's weights into `model`, strictly but for what may rightly differ.

    Positions of another resolution are resized; a head of another number of classes is left as it
    is in `model`. Returns a line for each of these.

    Raises:
        UserError: the file cannot be used, or is of another network.
    """
    state, notes = dict(read_state_dict(path, ema)), []
    own = model.state_dict()
    theirs, ours = state.get("pos_embed"), own.get("pos_embed")
    # A class token with a position of its own (class_token_at 0) is no part of the grid.
    if theirs is not None and ours is not None and model.config.class_token_at != 0:
        widths_agree = theirs.shape[-1] == ours.shape[-1]  # else it is another network, which is told below
        if widths_agree and theirs.shape != ours.shape:
            state["pos_embed"] = resize_positions(theirs, model.config.num_patches)
            notes.append(f"positions resized from {theirs.shape[1]} to {ours.shape[1]} patches")
    if "head.weight" in state and state["head.weight"].shape[0] != own["head.weight"].shape[0]:
        notes.append(f"the head's {state['head.weight'].shape[0]} classes left out; it starts anew")
        state.update({key: own[key] for key in ("head.weight", "head.bias")})
    for key in [*own, *state]:
        shapes = [tuple(side[key].shape) if key in side else "missing" for side in (own, state)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{path} is of another network: {key} is {shapes[1]} in it, {shapes[0]} in the model")
    model.load_state_dict(state)
    return notes


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
