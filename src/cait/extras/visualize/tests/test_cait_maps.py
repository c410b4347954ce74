"""Where a CaiT looks: timm's maps, their cut and their place on the image."""

import io

import numpy as np
import pytest
import timm
import torch
from networks import needs_ablations
from PIL import Image, ImageDraw
from torch import nn

import cait as package
from cait.data.datamodule import ImageNetDataModule
from cait.errors import UserError
from cait.extras import plots
from cait.extras.visualize import maps

SMALL_CAIT = dict(depth=2, embed_dim=48, patch_size=8, num_heads=4)


def test_maps_are_timms() -> None:
    torch.manual_seed(0)
    ours = package.create_model("xxs24", 32, 7, layer_scale_init=0.5, **SMALL_CAIT).eval()
    theirs = timm.create_model("cait_xxs24_224", img_size=32, num_classes=7, **SMALL_CAIT).eval()
    theirs.load_state_dict(ours.state_dict())
    mixed, of_class = [], []
    for block in theirs.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    for block in theirs.blocks_token_only:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: of_class.append(given[0]))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs(images)
    maps = ours.maps(images)
    assert len(mixed) == len(of_class) == 2
    for found, expected in zip(
        [*maps.self_attention, *maps.class_attention], [*mixed, *of_class], strict=True
    ):
        assert (found - expected).abs().max() <= 1e-6


def test_the_maps_of_a_network_leave_it_as_it_was() -> None:
    own = package.create_model("xxs24", img_size=32, depth=2, drop_path_rate=0.5).train()
    maps = own.maps(torch.randn(3, 3, 32, 32))
    assert [len(kind) for kind in maps] == [2, 2]
    assert own.training
    assert not any(part._forward_pre_hooks for part in own.modules())
    for kind, shape in zip(maps, ((3, 4, 4, 4), (3, 4, 1, 5)), strict=True):
        assert all(map_.shape == shape for map_ in kind)
    assert torch.allclose(maps.class_attention[0].sum(dim=-1), torch.ones(()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *(
            pytest.param(each, marks=needs_ablations)
            for each in (dict(cls_in_keys=False), dict(class_token_at=1))
        ),
    ],
    ids=str,
)
def test_the_patches_weights_are_cut_out_of_maps_of_every_kind(fields: dict) -> None:
    torch.manual_seed(0)
    network, image = (
        package.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval(),
        torch.randn(3, 32, 32),
    )
    found, whole_maps = maps.look(network, image), network.maps(image[None]).class_attention
    for ours, whole in zip(found, whole_maps, strict=True):
        assert ours.shape == (4, 4, 4)
        torch.testing.assert_close(ours.flatten(1), whole[0, :, 0, whole.shape[-1] - 16 :])
    figure = maps.draw(found, np.zeros((32, 32, 3), np.uint8), "<b>&\"cat'$_{$")  # no mathematics
    figure.savefig(io.BytesIO())
    drawn = {axes.get_title(): axes for axes in figure.axes}
    assert "as the network sees it\n32 × 32 pixels" in drawn
    least, largest = (16 * float(bound) for bound in found[1][3].aminmax())
    last = drawn[f"block 1, head 3\n×{least:.2f} … ×{largest:.2f}"]
    assert np.array_equal(last.images[0].get_array(), found[1][3])
    assert sum("head" in title for title in drawn) == 4 * 2


@needs_ablations
def test_a_cait_whose_class_token_is_there_from_the_start_is_refused() -> None:
    fields = dict(embed_dim=32, num_heads=2, depth=2, depth_token_only=0, class_token_at=0)
    with pytest.raises(UserError, match="no maps"):
        maps.look(package.create_model("xxs24", 32, 7, **fields).eval(), torch.randn(3, 32, 32))


def bright_seeker(img_size: int) -> nn.Module:
    """A CaiT whose class token reads bright patches: the first channel is brightness, and the query asks for it."""
    network = package.create_model(
        "xxs24",
        img_size,
        2,
        depth=1,
        depth_token_only=1,
        embed_dim=8,
        num_heads=2,
        patch_size=4,
        layer_scale_init=1e-9,
    )
    with torch.no_grad():
        for parameter in (
            network.patch_embed.proj.weight,
            network.patch_embed.proj.bias,
            network.pos_embed,
        ):
            parameter.zero_()
        network.patch_embed.proj.weight[0] = 1 / 48
        attn = network.blocks_token_only[0].attn
        for parameter in (attn.q.weight, attn.q.bias, attn.k.weight, attn.k.bias):
            parameter.zero_()
        for head in range(2):
            attn.q.bias[4 * head] = 4.0
            attn.k.weight[4 * head, 0] = 1.0
    return network.eval()


@pytest.mark.parametrize("crop_pct", [1.0, 0.8])
@pytest.mark.parametrize(("width", "height"), [(90, 40), (13, 9)])
def test_saliency_lands_on_the_object(width: int, height: int, crop_pct: float) -> None:
    side = min(width, height)
    corners = [
        at + sign * 0.15 * side
        for sign in (-1, 1)
        for at in (width / 2 + 0.18 * side, height / 2 - 0.12 * side)
    ]
    left, top, right, bottom = map(round, corners)
    photograph = Image.new("RGB", (width, height))
    ImageDraw.Draw(photograph).rectangle((left, top, right - 1, bottom - 1), fill="white")
    data = ImageNetDataModule(img_size=64, crop_pct=crop_pct)
    pixels = data.eval_transform(photograph).permute(1, 2, 0)
    (image,), _ = data.on_after_batch_transfer((pixels[None], None), 0)
    assert (plots.pixels(image, data.settings) == pixels.numpy()).all()
    gray = ImageNetDataModule(img_size=64, in_chans=1)
    seen = pixels[..., :1].expand(-1, -1, 3)
    assert (
        plots.pixels(gray.normalize_and_erase(seen[None])[0], gray.settings) == seen.numpy()
    ).all()

    figure = maps.draw(maps.look(bright_seeker(64), image), pixels.numpy(), "")
    axes = next(axes for axes in figure.axes if axes.get_title() == "saliency")
    below, above = axes.images
    assert below.get_extent() == above.get_extent()  # over the pixels that the network sees
    assert np.array_equal(below.get_array(), pixels)
    weights = np.asarray(above.get_array())
    salient, bright = (
        np.kron(weights > weights.max() / 2, np.ones((4, 4))),
        pixels.float().mean(dim=2).numpy() > 127,
    )
    for axis in (0, 1):
        assert abs(np.nonzero(bright)[axis].mean() - np.nonzero(salient)[axis].mean()) <= 2
