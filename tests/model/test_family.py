"""The ten models and the ablations: what they are at the start; DeiT falls out of them."""

from __future__ import annotations

import pytest
import timm
import torch
from networks import DEIT_S
from timm.models.cait import ClassAttn

import cait
from cait.errors import UserError

SMALL = dict(name="s24", img_size=32, embed_dim=32, num_heads=4, num_classes=10, drop_path_rate=0.0)


def test_deit_falls_out() -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("deit_small_patch16_224").eval()
    ours = cait.create_model(**DEIT_S, class_token_at=0).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        dict(residual="rezero"),
        dict(residual="skipinit"),
        dict(residual="fixup"),
        dict(layer_scale_init=0.0),
    ],
    ids=str,
)
def test_these_start_as_the_identity(fields: dict) -> None:
    torch.manual_seed(0)
    model = cait.create_model(**SMALL, depth=3, **fields)
    x = torch.randn(2, 4, 32)
    assert torch.equal(model.blocks(x), x)
    cls = torch.randn(2, 1, 32)
    assert torch.equal(model.blocks_token_only[0](x, cls), cls)
    if fields.get("residual") == "fixup":
        assert not model(torch.randn(2, 3, 32, 32)).any()  # and the classifier at 0


@pytest.mark.parametrize("residual", ["layerscale", "scalar"])
def test_epsilon_scales_each_branch(residual: str) -> None:
    torch.manual_seed(0)
    block = cait.create_model(**SMALL, depth=36, residual=residual).blocks[0]
    x = torch.randn(2, 4, 32, dtype=torch.float64)
    block.double()
    middle = x + 1e-6 * block.attn(block.norm1(x))
    expected = middle + 1e-6 * block.mlp(block.norm2(middle))
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-12)
    assert not torch.equal(block(x), x)


def test_fixup_and_t_fixup_weights_follow_their_papers() -> None:
    torch.manual_seed(0)
    fields = SMALL | dict(embed_dim=128, depth=8, talking_heads=False)
    plain = cait.create_model(**fields, residual="plain")
    fixup = cait.create_model(**fields, residual="fixup")
    branches = 2 * (8 + 2)
    for name in ("attn.qkv", "mlp.fc1"):
        weight, reference = (model.blocks[3].get_submodule(name).weight for model in (fixup, plain))
        assert weight.std().item() == pytest.approx(reference.std().item() * branches**-0.5, rel=0.05)
    for name in ("attn.proj", "mlp.fc2"):
        assert not fixup.blocks[3].get_submodule(name).weight.any()
    extra = set(fixup.state_dict()) - set(plain.state_dict())
    biases = {"attn.bias_qkv", "attn.bias_proj", "mlp.bias_fc1", "mlp.bias_act", "mlp.bias_fc2"}
    assert {name.removeprefix("blocks.3.") for name in extra if name.startswith("blocks.3.")} == (
        {f"{name}.bias" for name in biases} | {"gamma_1", "gamma_2"}
    )

    t_fixup = cait.create_model(**fields, residual="t-fixup")
    factor = 0.67 * 10**-0.25
    xavier = (2 / (128 + 128)) ** 0.5
    q, k, v = t_fixup.blocks[3].attn.qkv.weight.chunk(3)
    assert q.std().item() == pytest.approx(xavier, rel=0.05)
    assert k.std().item() == pytest.approx(xavier, rel=0.05)
    assert v.std().item() == pytest.approx(xavier * factor, rel=0.05)
    assert t_fixup.blocks[3].mlp.fc1.weight.std().item() == pytest.approx((2 / 640) ** 0.5 * factor, rel=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        dict(residual="none"),
        dict(norm="batchnorm"),
        dict(act="leaky_relu"),
        dict(attention="cosine"),
        dict(cls_in_keys=False),
        dict(layer_scale_token_only=False),
        dict(class_token_at=1),
        dict(class_token_at=1, depth_token_only=0),
        dict(num_heads=32),
        dict(residual="fixup", talking_heads=False),
        dict(residual="t-fixup"),
        dict(residual="fixup", norm="batchnorm", attention="cosine"),
    ],
    ids=str,
)
def test_every_choice_takes_a_step(fields: dict) -> None:
    torch.manual_seed(0)
    model = cait.create_model(**(SMALL | dict(depth=3) | fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_class_attention_is_timms() -> None:
    torch.manual_seed(0)
    block = cait.create_model(**SMALL, depth=1, layer_scale_init=0.5).double().blocks_token_only[0]
    z = torch.randn(2, 6, 32, dtype=torch.float64)
    theirs = ClassAttn(32, num_heads=4, qkv_bias=True).double()
    theirs.load_state_dict(block.attn.state_dict())
    assert torch.allclose(block.attn(z), theirs(z), rtol=0, atol=1e-12)
    middle = z[:, :1] + 0.5 * block.attn(block.norm1(z))
    expected = middle + 0.5 * block.mlp(block.norm2(middle))
    assert torch.allclose(block(z[:, 1:], z[:, :1]), expected, rtol=0, atol=1e-12)


def test_cosine_scores() -> None:
    torch.manual_seed(0)
    attention = cait.create_model(**SMALL, depth=1, attention="cosine", talking_heads=False).blocks[0].attn
    x = torch.randn(2, 5, 32)
    q, k, v = attention.qkv(x).reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    maps = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).softmax(-1)
    assert torch.allclose(attention(x), attention.proj((maps @ v).transpose(1, 2).flatten(2)), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(stem="cnv"), "stem must be one of patch, conv, pooled, got 'cnv'"),
        (dict(talking_heads="yes"), "true or false"),
        (dict(class_token_at=24), "one of the 24 blocks"),
        (dict(layer_scale_init="1e-5"), "layer_scale_init must be a number"),
        (dict(global_pool="avg"), "depth_token_only must be 0"),
        (dict(depht=3), "did you mean depth"),
        (dict(img_size=225), "multiple of patch_size"),
        (dict(num_heads=5), "multiple of num_heads"),
        (dict(drop_path_rate=1.0), r"\[0, 1\)"),
        (dict(depth=-1), "depth must be at least 0, got -1"),
        (dict(attention_backend="fusd"), "attention_backend must be one of recompute, reference"),
    ],
)
def test_choices_that_cannot_be_are_told(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        cait.create_model("s24", **fields)
    with pytest.raises(UserError, match="unknown model 'xxl'; choose one of xxs24"):
        cait.create_model("xxl")
