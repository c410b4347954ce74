"""Weights of three channels go into a network of other channels as timm fits them."""

import pytest
import torch
from modules import FIELDS
from timm.models._manipulate import adapt_input_conv

import cait
from cait.errors import UserError
from cait.model.weights import load_weights


@pytest.mark.parametrize("channels", [1, 5])
def test_weights_of_three_channels_are_fitted_as_timm_fits_them(channels, tmp_path):
    color = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS)
    other = cait.create_model("xxs24", img_size=8, num_classes=7, **FIELDS, in_chans=channels)
    torch.save(color.state_dict(), tmp_path / "color.pth")
    [line] = load_weights(other, tmp_path / "color.pth")
    assert "patch_embed.proj.weight" in line
    expected = adapt_input_conv(channels, color.patch_embed.proj.weight)
    assert torch.equal(other.patch_embed.proj.weight, expected)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"patch_embed\.proj\.weight"):
        load_weights(color, tmp_path / "other.pth")
