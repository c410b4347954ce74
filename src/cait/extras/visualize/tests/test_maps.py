"""Maps of networks without class attention, beside what the libraries' and closed forms give."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from cait import create_model
from cait.errors import UserError
from cait.extras.visualize import maps


@pytest.mark.parametrize(("pool", "reads"), [("token", slice(0, 1)), ("avg", slice(1, None))])
def test_attention_is_the_softmax_of_the_last_block(pool: str, reads: slice) -> None:
    torch.manual_seed(0)
    network = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=2, num_classes=5, global_pool=pool).eval()
    image = torch.randn(3, 64, 64)
    seen: list[torch.Tensor] = []
    hook = network.blocks[-1].attn.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    network(image[None])
    hook.remove()
    q, k, _ = network.blocks[-1].attn.qkv(seen[0]).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(dim=-1)
    assert maps.kind(network) == "attention"
    (found,) = maps.look(network, image)
    torch.testing.assert_close(found, weights[0, :, reads, 1:].mean(dim=1).unflatten(-1, (4, 4)))
    assert all(block.attn.fused_attn for block in network.blocks)  # the network itself is as it was


def test_grad_cam_of_pooled_maps_is_cam() -> None:
    """With a linear head on the mean of the maps, Grad-CAM is their weighted sum (CAM, arXiv 1512.04150)."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
    network = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).eval().requires_grad_(False)
    image = torch.randn(3, 17, 17)
    made = body(image[None])
    row = network[-1].weight[network(image[None]).argmax()]
    expected = torch.einsum("k,bkst->bst", row, made).relu() / made[0, 0].numel()
    assert maps.kind(network) == "Grad-CAM"
    (found,) = maps.look(network, image)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "mixer_s32_224"])
def test_networks_without_such_maps_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="no maps"):
        maps.look(timm.create_model(name).eval(), torch.randn(3, 224, 224))


def test_a_cait_whose_class_token_is_there_from_the_start_is_refused() -> None:
    fields = dict(embed_dim=32, num_heads=2, depth=2, depth_token_only=0, class_token_at=0)
    with pytest.raises(UserError, match="no maps"):
        maps.look(create_model("xxs24", 32, 7, **fields).eval(), torch.randn(3, 32, 32))
