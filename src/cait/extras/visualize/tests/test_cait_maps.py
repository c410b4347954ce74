"""Where a CaiT looks: timm's maps, and what is cut out of them."""

import io

import numpy as np
import timm
import torch
from harness import over_table
from timm.utils import AttentionExtract

import cait
from cait.extras.visualize import maps

SMALL_CAIT = dict(depth=2, embed_dim=48, patch_size=8, num_heads=4)
EVIL = "<b>&\"cat'$_{$"
"""A class that is called like HTML, and like mathematics to matplotlib."""


def test_maps_are_timms_and_leave_the_network_as_it_was():
    torch.manual_seed(0)
    ours = cait.create_model("xxs24", 32, 7, 0.5, layer_scale_init=0.5, **SMALL_CAIT)
    theirs = timm.create_model("cait_xxs24_224", img_size=32, num_classes=7, **SMALL_CAIT)
    theirs.load_state_dict(ours.state_dict())
    for block in theirs.blocks_token_only:
        block.attn.fused_attn = False
    images = torch.randn(2, 3, 32, 32)
    of_timm = AttentionExtract(theirs, method="hook")(images)
    expected = [of_timm[name] for name in sorted(of_timm)]
    self_attention, class_attention = ours.train().maps(images)
    assert len(class_attention) == 2
    torch.testing.assert_close([*self_attention, *class_attention], expected, rtol=0, atol=1e-6)
    assert ours.training
    assert not any(module._forward_pre_hooks for module in ours.modules())


@over_table(__file__, "networks")
def test_the_patches_weights_are_cut_out_of_maps_of_every_kind(fields):
    torch.manual_seed(0)
    network = cait.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval()
    image = torch.randn(3, 32, 32)
    of_patches = maps.look(network, image)
    maps_of_all = network.maps(image[None]).class_attention
    for weights, whole in zip(of_patches, maps_of_all, strict=True):
        assert weights.shape == (4, 4, 4)
        torch.testing.assert_close(weights.flatten(1), whole[0, :, 0, -16:])
    pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    figure = maps.draw(of_patches, pixels, EVIL)
    figure.savefig(io.BytesIO())
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert "as the network sees it\n32 × 32 pixels" in panels
    below, above = panels["saliency"].images
    assert below.get_extent() == above.get_extent()  # over the pixels that the network sees
    assert np.array_equal(below.get_array(), pixels)
    assert np.array_equal(above.get_array(), of_patches[0].mean(dim=0))
    last = of_patches[1][3]
    title = f"block 1, head 3\n×{16 * last.min():.2f} … ×{16 * last.max():.2f}"
    assert np.array_equal(panels[title].images[0].get_array(), last)
    assert sum("head" in title for title in panels) == 4 * 2
