"""CaiT and timm's networks as timm reads them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models import save_for_hf
from torch import nn

from cait.data.transforms import CROP_MODES
from cait.errors import UserError
from cait.model.cait import CaiT
from cait.model.config import CaiTConfig, variant_config

TIMM_FIELDS = (
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depth_token_only", "num_heads"),
    *("mlp_ratio", "qkv_bias"),
)
"""The fields that timm's CaiT has too, under the same names. In all other fields timm's CaiT is the paper's."""
TIMM_PREPROCESSING = ("mean", "std", "crop_pct", "interpolation")
ANY = "timm takes CaiT as published and its own networks, onnx and torch_export take any"


def write_timm(model: nn.Module, path: Path, metadata: Mapping[str, Any], shape: Sequence[int]) -> nn.Module:
    """`model.safetensors` and `config.json`, for `timm.create_model("local-dir:DIR", pretrained=True)` or the hub."""
    network = _in_timm(model) if isinstance(model, CaiT) else model
    if not type(network).__module__.startswith("timm."):
        raise UserError(f"timm does not know {type(network).__name__}: {ANY}")
    config = {"label_names": metadata["class_names"]} if "class_names" in metadata else {}
    prepared = {name: metadata[name] for name in TIMM_PREPROCESSING if name in metadata}
    if (fit := metadata.get("fit", "crop")) != "crop":
        prepared["crop_mode"] = CROP_MODES[fit]
    data_config = {"input_size": tuple(shape), **prepared}
    save_for_hf(network, str(path), safe_serialization=True, model_config=config, data_config=data_config)
    shutil.copymode(path / "config.json", path / "model.safetensors")  # safetensors lets only the owner read it
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def _in_timm(cait: CaiT) -> nn.Module:
    """timm's CaiT with the same fields and weights. Its configuration names none of timm's weights."""
    config = cait.config
    smallest_first = sorted(timm.list_models("cait_*"), key=len, reverse=True)  # by the x in their names
    arguments = {entry: _arguments(entry, config) for entry in smallest_first}
    entry = min(arguments, key=lambda name: len(arguments[name]))
    overlay: dict[str, Any] = dict(url=None, hf_hub_id=None, tag=None, license=None)
    overlay.update(num_classes=config.num_classes, input_size=cait.input_shape)
    network = timm.create_model(entry, pretrained_cfg_overlay=overlay, **arguments[entry])
    try:
        network.load_state_dict(cait.state_dict())
    except RuntimeError as error:
        raise UserError(f"this network has other parts than timm's CaiT: {ANY}") from error
    return network


def _arguments(entry: str, config: CaiTConfig) -> dict[str, Any]:
    """What makes timm's model `entry`, as "cait_xxs24_224", one with these fields."""
    _, name, img_size = entry.split("_")
    row = variant_config(name, img_size=int(img_size))
    differ = {key: getattr(config, key) for key in TIMM_FIELDS if getattr(config, key) != getattr(row, key)}
    if "mlp_ratio" in differ:
        differ["mlp_ratio_token_only"] = config.mlp_ratio  # timm has one for each stage
    return differ
