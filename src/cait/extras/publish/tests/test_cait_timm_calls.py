"""What is written for timm's networks works on a CaiT: each call beside timm's own CaiT with the same weights."""

from typing import Any

import pytest
import timm
import torch
from networks import needs_ablations, random_network
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from cait import create_model
from cait.errors import UserError

SIZES: dict[str, Any] = dict(
    img_size=16, num_classes=7, embed_dim=16, depth=4, num_heads=2, patch_size=4
)
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def both() -> tuple[Any, Any]:
    """Our network and timm's, with the same weights."""
    ours, theirs = (
        random_network(**SIZES).eval(),
        timm.create_model("cait_xxs24_224", **SIZES).eval(),
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    else:
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)


@torch.no_grad()
@pytest.mark.parametrize("pool", [None, "token", "avg", ""])
def test_a_head_reads_what_timms_reads(both: tuple[Any, Any], pool: str | None) -> None:
    ours, theirs = both
    for model in both:
        model.reset_classifier(5, pool)
    ours.head.load_state_dict(theirs.head.state_dict())
    assert (ours.num_classes, ours.config.num_classes, ours.get_classifier()) == (5, 5, ours.head)
    features = theirs.forward_features(IMAGES)
    same(ours.forward_features(IMAGES), features)
    for pre_logits in (False, True):
        same(*(model.forward_head(features, pre_logits=pre_logits) for model in both))
    same(ours(IMAGES), theirs(IMAGES))
    for model in both:
        model.reset_classifier(0)
    assert ours.num_classes == theirs.num_classes == 0
    same(ours(IMAGES), theirs(IMAGES))


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        dict(indices=2, norm=True),
        dict(indices=[0, -2], stop_early=True),
        dict(indices=(1,), output_fmt="NLC", intermediates_only=True),
    ],
    ids=str,
)
def test_intermediates_are_timms(both: tuple[Any, Any], arguments: dict[str, Any]) -> None:
    same(*(model.forward_intermediates(IMAGES, **arguments) for model in both))


@torch.no_grad()
def test_timms_feature_extractor_takes_it(both: tuple[Any, Any]) -> None:
    assert both[0].feature_info == both[1].feature_info
    for name in (
        "num_features",
        "embed_dim",
        "head_hidden_size",
        "num_prefix_tokens",
        "num_classes",
        "global_pool",
    ):
        assert getattr(both[0], name) == getattr(both[1], name)
    for indices, prune in (((1, 3), False), ((0, 2), True)):
        ours, theirs = (FeatureGetterNet(model, out_indices=indices, prune=prune) for model in both)
        assert ours.feature_info.channels() == theirs.feature_info.channels() == [16, 16]
        same(ours(IMAGES), theirs(IMAGES))
    assert [len(model.blocks) for model in both] == [3, 3]
    assert not any(
        name.startswith(("blocks_token_only", "norm", "head")) for name in both[0].state_dict()
    )


def test_activations_are_computed_again_with_the_same_gradients() -> None:
    model, found = random_network(**SIZES, drop_path_rate=0.0), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.cat(
            model.forward_intermediates(IMAGES, intermediates_only=True)
        ).square().sum().backward()
        found.append([parameter.grad for parameter in model.blocks.parameters()])
    same(*found)


@needs_ablations
def test_networks_with_other_tokens_give_the_patches() -> None:
    for fields in (dict(class_token_at=0), dict(global_pool="avg", depth_token_only=0)):
        model = random_network(**SIZES, **fields).eval()
        tokens, (*_, patches) = model.forward_intermediates(IMAGES)
        assert patches.shape == (3, 16, 4, 4)
        same(tokens, model.forward_features(IMAGES))
        same(model.forward_head(tokens), model(IMAGES))


def test_what_does_not_exist_is_refused_and_a_new_head_lies_where_the_network_does() -> None:
    model = create_model("xxs24", **SIZES).to(torch.float64)
    model.reset_classifier(3)
    assert isinstance(model.head, nn.Linear)
    assert model.head.weight.dtype == torch.float64
    with pytest.raises(
        UserError, match="global_pool must be token, avg or '' for all tokens, got 'max'"
    ):
        model.reset_classifier(3, "max")
    with pytest.raises(UserError, match="output_fmt must be NCHW or NLC, got 'NHWC'"):
        model.forward_intermediates(IMAGES, output_fmt="NHWC")
