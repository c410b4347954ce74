"""The convolutional stems against timm's XCiT and plain layers; their weights at another resolution."""

from itertools import pairwise

import pytest
import timm
import timm.models.xcit
import torch
from harness import over_table
from networks import step
from same import same
from torch import nn

import cait
from cait.errors import UserError
from cait.model.network import counts_twice
from cait.model.weights import load_weights


def with_stem(stem, img_size=32, patch_size=8, **fields):
    torch.manual_seed(0)
    shallow = dict(embed_dim=32, depth=2, num_heads=2, layer_scale_init=1.0)
    return cait.create_model(
        "xxs24", img_size, 5, 0.1, stem=stem, patch_size=patch_size, **(shallow | fields)
    )


@pytest.mark.parametrize("stem", ["conv", "pooled", "patch"])
@over_table(__file__, "sizes")
def test_any_patch_size_gives_as_many_tokens_as_the_patches(stem, img_size, patch_size):
    images = torch.randn(2, 1, img_size, img_size)
    model = with_stem(stem, img_size, patch_size, in_chans=1)
    tokens = model.patch_embed(images)
    assert tokens.shape == (2, model.config.num_patches, 32)
    assert tokens.is_contiguous()
    step(model, images, 0)
    assert not counts_twice(model)  # the stem is not among the blocks that are computed again
    for parameter in model.patch_embed.parameters():
        assert parameter.grad.abs().sum() > 0


def convolution(before, width, stride):
    convolution = nn.Conv2d(before, width, 3, stride, 1, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU()]


@over_table(__file__, "pooled")
def test_the_pooled_stem_halves_by_pooling_from_the_second_convolution_on(patch_size, widths):
    stem = with_stem("pooled", 64, patch_size, embed_dim=64).patch_embed
    layers = convolution(3, widths[0], 2)
    for before, width in pairwise(widths):
        layers += [*convolution(before, width, 1), nn.MaxPool2d(2)]
    expected = nn.Sequential(*layers, nn.Conv2d(64, 64, 1))
    weights = zip(expected.state_dict(), stem.state_dict().values(), strict=True)
    expected.load_state_dict(dict(weights))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(stem(images), expected(images).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("patch_size", [8, 16])
def test_the_convolutions_of_a_stem_are_those_of_timms_xcit(patch_size):
    """XCiT has them without the ReLU and the projection at the end."""
    stem = with_stem("conv", 64, patch_size, embed_dim=64).patch_embed
    xcit = timm.models.xcit.ConvPatchEmbed(64, patch_size, embed_dim=64, act_layer=nn.ReLU)
    weights = zip(xcit.state_dict(), stem.layers.state_dict().values(), strict=True)
    xcit.load_state_dict(dict(weights))
    images = torch.randn(2, 3, 64, 64)
    for training in (True, False):  # in evaluation with the statistics of the pass before
        expected = xcit.train(training)(images)[0].relu()
        tokens = stem.train(training).layers(images).flatten(2).transpose(1, 2)
        torch.testing.assert_close(tokens, expected)


def test_the_weights_of_a_stem_fit_another_resolution_and_no_other_stem(tmp_path):
    model, path = with_stem("conv"), tmp_path / "conv.pth"
    torch.save(model.state_dict(), path)
    larger = with_stem("conv", 48)
    assert load_weights(larger, path) == ["positions resized from 16 to 36 patches"]
    assert same(larger.patch_embed.state_dict(), model.patch_embed.state_dict())
    for other in (with_stem("patch"), with_stem("conv", patch_size=4)):
        with pytest.raises(UserError, match="patch_embed"):
            load_weights(other, path)
