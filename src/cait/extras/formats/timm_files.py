"""CaiT and timm's networks as timm reads them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from cait.data.transforms import CROP_MODES
from cait.errors import UserError
from cait.extras.formats.exporting import Format, Forward, Metadata
from cait.model.cait import CaiT
from cait.model.config import VARIANTS, CaiTConfig, variant_config

ONLY_IN_TRAINING = {
    *("attention_backend", "drop_path_mode", "drop_path_rate"),
    *("layer_scale_init", "layer_scale_dist"),
}
"""Fields that the output of a trained CaiT does not depend on."""
TIMM_FIELDS = (
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depth_token_only", "num_heads"),
    *("mlp_ratio", "qkv_bias"),
)
"""The fields that timm's CaiT has too, under the same names. In all other fields timm's CaiT is the paper's."""
TIMM_PREPROCESSING = ("mean", "std", "crop_pct", "interpolation")
ANY = "torch_export takes any network"


def twin(config: CaiTConfig) -> nn.Module:
    """timm's model with the same fields. Its configuration names none of timm's weights."""
    entry, differ = _nearest(config)
    overlay: dict[str, Any] = dict(url=None, hf_hub_id=None, tag=None, license=None)
    overlay.update(num_classes=config.num_classes, input_size=(config.in_chans, config.img_size, config.img_size))
    return timm.create_model(entry, pretrained_cfg_overlay=overlay, **differ)


def _nearest(config: CaiTConfig) -> tuple[str, dict[str, Any]]:
    """The timm model nearest to this one, and the arguments in which they differ."""
    found: list[tuple[tuple[int, int], str, dict[str, Any]]] = []
    for entry in timm.list_models("cait_*"):
        _, name, img_size = entry.split("_")
        if name in VARIANTS:
            row = variant_config(name, img_size=int(img_size))
            differ = {key: getattr(config, key) for key in TIMM_FIELDS if getattr(config, key) != getattr(row, key)}
            found.append(((len(differ), abs(config.embed_dim - row.embed_dim)), entry, differ))
    _, entry, differ = min(found, key=lambda candidate: candidate[0])
    if "mlp_ratio" in differ:
        differ["mlp_ratio_token_only"] = config.mlp_ratio  # timm has one for each stage
    return entry, differ


def _in_timm(cait: CaiT) -> nn.Module:
    with torch.device("meta"):  # timm's initial weights are not wanted
        network = twin(cait.config)
    network.load_state_dict(cait.state_dict(), assign=True)
    return network


def _write_timm(model: nn.Module, path: Path, metadata: Metadata, shape: Sequence[int]) -> Forward:
    """`model.safetensors` and `config.json`, for `timm.create_model("local-dir:DIR", pretrained=True)` or the hub."""
    if not type(model).__module__.startswith("timm."):
        _refuse(model)
    network = _in_timm(model) if isinstance(model, CaiT) else model
    config = {"label_names": metadata["class_names"]} if "class_names" in metadata else {}
    prepared = {name: metadata[name] for name in TIMM_PREPROCESSING if name in metadata}
    if (fit := metadata.get("fit", "crop")) != "crop":
        prepared["crop_mode"] = CROP_MODES[fit]
    data_config = {"input_size": tuple(shape), **prepared}
    save_for_hf(network, str(path), safe_serialization=True, model_config=config, data_config=data_config)
    shutil.copymode(path / "config.json", path / "model.safetensors")  # safetensors lets only the owner read it
    return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def _refuse(cait: nn.Module) -> None:
    if not isinstance(cait, CaiT):
        raise UserError(f"timm holds a CaiT or one of timm's networks, not {type(cait).__name__}; {ANY}")
    for field in fields(CaiTConfig):
        value = getattr(cait.config, field.name)
        if field.name not in (*TIMM_FIELDS, *ONLY_IN_TRAINING) and value != field.default:
            has = f"has no CaiT of {field.name} {value}, only of {field.default}"
            raise UserError(f"timm {has}; {ANY}")


TIMM = Format(_write_timm, "timm", 1e-5)
