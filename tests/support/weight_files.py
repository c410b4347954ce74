"""A network's weights in every file form."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cait
from cait.errors import UserError
from cait.model.weights import load_weights


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights of an ordinary size, with every block's share in the output well above rounding."""
    torch.manual_seed(seed)
    for key, parameter in model.named_parameters():
        one_sided = "gamma" in key or ("norm" in key and "weight" in key)
        parameter.uniform_(*((0.5, 1.0) if one_sided else (-0.05, 0.05)))


def forms(path: Path, state: dict[str, torch.Tensor]) -> dict[str, Path]:
    """The same weights in every file form."""
    files = {
        name: path / name for name in ("bare.pth", "release.pth", "timm.pth.tar", "x.safetensors")
    }
    torch.save(state, files["bare.pth"])
    released = {
        "model": {f"module.{key}": value for key, value in state.items()},
        "args": argparse.Namespace(lr=5e-4),
    }
    torch.save(released, files["release.pth"])
    torch.save({"state_dict": state, "epoch": 3, "state_dict_ema": state}, files["timm.pth.tar"])
    save_file(state, files["x.safetensors"])
    return files


def told(path: Path, model: str = "xxs24", ema: bool = False) -> str:
    with torch.device("meta"):
        net = cait.create_model(model)
    with pytest.raises(UserError) as caught:
        load_weights(net, path, ema)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line
