"""What is written for timm's networks works on a CaiT: each call beside timm's own CaiT with the same weights."""

from functools import partial

import pytest
import timm
import torch
from harness import over_table
from networks import needs_ablations, random_network
from timm.models._features import FeatureGetterNet

SIZES: dict = dict(img_size=16, num_classes=7, embed_dim=16, depth=4, num_heads=2, patch_size=4)
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
same = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
ATTRIBUTES = """
    num_features embed_dim head_hidden_size num_prefix_tokens num_classes global_pool feature_info
"""


def with_head(model, pool):
    torch.manual_seed(0)
    model.reset_classifier(5, pool)
    tokens = model.forward_features(IMAGES)
    assert model.get_classifier() is model.head
    pooled = model.forward_head(tokens, pre_logits=True)
    return [model.num_classes, tokens, pooled, model.forward_head(tokens), model(IMAGES)]


def without_head(model):
    model.reset_classifier(0)
    return [model.num_classes, model(IMAGES)]


def intermediates(model, **arguments):
    return model.forward_intermediates(IMAGES, **arguments)


def features(model, **arguments):
    getter = FeatureGetterNet(model, **arguments)
    names = [name for name in model.state_dict() if not name.startswith("cls_token")]
    return [getter(IMAGES), getter.feature_info.channels(), len(model.blocks), len(names)]


DOES = {does.__name__: does for does in (with_head, without_head, intermediates, features)}


@over_table(__file__, "calls")
@torch.no_grad()
def test_a_call_gives_what_it_gives_on_timms_network(does, arguments):
    ours = random_network(**SIZES).eval()
    theirs = timm.create_model("cait_xxs24_224", **SIZES).eval()
    theirs.load_state_dict(ours.state_dict())
    for name in ATTRIBUTES.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    same(DOES[does](ours, **arguments), DOES[does](theirs, **arguments))


def test_activations_are_computed_again_with_the_same_gradients():
    model = random_network(**SIZES, drop_path_rate=0.0)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        maps = model.forward_intermediates(IMAGES, intermediates_only=True)
        torch.cat(maps).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.blocks.parameters()])
    same(*gradients)


@needs_ablations
@pytest.mark.parametrize(
    "fields", [dict(class_token_at=0), dict(global_pool="avg", depth_token_only=0)], ids=str
)
def test_networks_with_other_tokens_give_the_patches(fields):
    model = random_network(**SIZES, **fields).eval()
    tokens, (*_, patches) = model.forward_intermediates(IMAGES)
    assert patches.shape == (3, 16, 4, 4)
    same(tokens, model.forward_features(IMAGES))
    same(model.forward_head(tokens), model(IMAGES))


def test_a_new_head_lies_where_the_network_does():
    model = random_network(**SIZES).to(torch.float64)
    model.reset_classifier(3)
    assert model.head.weight.dtype == torch.float64
    assert model.config.num_classes == model.head.out_features == 3
