"""The convolutional stems against timm's XCiT and plain layers; their weights at another resolution."""

from pathlib import Path

import pytest
import timm
import timm.models.xcit
import torch
from networks import step
from torch import nn

import cait
from cait.errors import UserError
from cait.model.cait import CaiT
from cait.model.network import counts_twice
from cait.model.weights import load_weights

SHALLOW: dict = dict(embed_dim=32, depth=2, num_heads=2, layer_scale_init=1.0)


def with_stem(
    img_size: int = 32, patch_size: int = 8, stem: str = "conv", **fields: object
) -> CaiT:
    torch.manual_seed(0)
    return cait.create_model(
        "xxs24", img_size, 5, 0.1, stem=stem, patch_size=patch_size, **(SHALLOW | fields)
    )


@pytest.mark.parametrize(("img_size", "patch_size"), [(16, 4), (28, 14), (20, 5), (4, 1)])
def test_any_patch_size_gives_as_many_tokens_as_the_patches(img_size: int, patch_size: int) -> None:
    images = torch.randn(2, 1, img_size, img_size)
    for stem in ("conv", "pooled", "patch"):
        model = with_stem(img_size, patch_size, stem, in_chans=1)
        assert model.patch_embed(images).shape == (2, model.config.num_patches, 32)
        assert model.patch_embed(images).is_contiguous()
        step(model, images, 0)
        assert not counts_twice(model)  # the stem is not among the blocks that are computed again
        assert all(p.grad.abs().sum() > 0 for p in model.patch_embed.parameters())


@pytest.mark.parametrize(("patch_size", "widths"), [(16, (16, 16, 32, 64)), (4, (32, 64))])
def test_the_pooled_stem_halves_by_pooling_from_the_second_convolution_on(
    patch_size: int, widths: tuple
) -> None:
    stem = with_stem(64, patch_size, "pooled", embed_dim=64).patch_embed
    expected, before = nn.Sequential(), 3
    for width in widths:
        is_first = before == 3
        expected.extend(
            [
                nn.Conv2d(before, width, 3, 2 if is_first else 1, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
        )
        expected.extend([] if is_first else [nn.MaxPool2d(2)])
        before = width
    expected.append(nn.Conv2d(64, 64, 1))
    expected.load_state_dict(
        dict(zip(expected.state_dict(), stem.state_dict().values(), strict=True))
    )
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(stem(images), expected(images).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("patch_size", [8, 16])
def test_the_convolutions_of_a_stem_are_those_of_timms_xcit(patch_size: int) -> None:
    """XCiT has them without the ReLU and the projection at the end."""
    stem = with_stem(64, patch_size, embed_dim=64).patch_embed
    theirs = timm.models.xcit.ConvPatchEmbed(64, patch_size, embed_dim=64, act_layer=nn.ReLU)
    kinds = nn.Conv2d, nn.BatchNorm2d
    layers = [[m for m in part.modules() if isinstance(m, kinds)] for part in (stem.layers, theirs)]
    for ours, their in zip(*layers, strict=True):
        their.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64)
    for training in (True, False):  # in evaluation with the statistics of the pass before
        ours, their = stem.train(training).layers(images), theirs.train(training)(images)[0]
        torch.testing.assert_close(ours.flatten(2).transpose(1, 2), their.relu())


def test_the_weights_of_a_stem_fit_another_resolution_and_no_other_stem(tmp_path: Path) -> None:
    model, path = with_stem(), tmp_path / "conv.pth"
    torch.save(model.state_dict(), path)
    larger = with_stem(48)
    assert load_weights(larger, path) == ["positions resized from 16 to 36 patches"]
    for name, weight in model.patch_embed.state_dict().items():
        assert torch.equal(larger.patch_embed.state_dict()[name], weight)
    for other in (with_stem(stem="patch"), with_stem(patch_size=4)):
        with pytest.raises(UserError, match="is of another network: patch_embed"):
            load_weights(other, path)
