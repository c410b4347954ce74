"""Where a CaiT looks: timm's maps, and what is cut out of them."""

import pytest
import timm
import torch
from networks import needs_ablations
from timm.utils import AttentionExtract

import cait
from cait.extras.visualize import maps

SMALL_CAIT: dict = dict(depth=2, embed_dim=48, patch_size=8, num_heads=4)


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


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param(dict(cls_in_keys=False), marks=needs_ablations),
        pytest.param(dict(class_token_at=1), marks=needs_ablations),
    ],
    ids=str,
)
def test_the_patches_weights_are_cut_out_of_maps_of_every_kind(fields):
    torch.manual_seed(0)
    network = cait.create_model("xxs24", 32, 7, **SMALL_CAIT | fields).eval()
    image = torch.randn(3, 32, 32)
    whole = network.maps(image[None]).class_attention
    expected = [weights[0, :, 0, -16:].unflatten(1, (4, 4)) for weights in whole]
    torch.testing.assert_close(maps.look(network, image), expected)
