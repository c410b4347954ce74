"""The paper's ablations: DeiT against timm's, the rivals of LayerScale by their papers, and a step of each."""

from copy import deepcopy

import pytest
import timm
import torch
from harness import over_table
from torch.nn.functional import cosine_similarity, cross_entropy

import cait

SMALL = dict(name="s24", img_size=32, embed_dim=32, num_heads=4, num_classes=10, drop_path_rate=0.0)
DEIT_S = dict(
    name="s24",
    depth=12,
    num_heads=6,
    talking_heads=False,
    residual="plain",
    depth_token_only=0,
    drop_path_rate=0.0,
)


def small(**fields):
    torch.manual_seed(0)
    return cait.create_model(**(SMALL | fields))


@over_table(__file__, "deit")
def test_deit_falls_out(fields, of_timm):
    torch.manual_seed(0)
    theirs = timm.create_model("deit_small_patch16_224", **of_timm).eval()
    ours = cait.create_model(**DEIT_S, **fields).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert (theirs(images) - ours(images)).abs().max() <= 1e-5


@over_table(__file__, "identities")
def test_these_start_as_the_identity(fields):
    model = small(depth=3, **fields)
    x = torch.randn(2, 4, 32)
    assert torch.equal(model.blocks(x), x)
    cls = torch.randn(2, 1, 32)
    assert torch.equal(model.blocks_token_only[0](x, cls), cls)
    if fields == {"residual": "fixup"}:
        assert not model(torch.randn(2, 3, 32, 32)).any()  # and the classifier at 0


@pytest.mark.parametrize("residual", ["layerscale", "scalar"])
def test_epsilon_scales_each_branch(residual):
    block = small(depth=36, residual=residual).blocks[0].double()
    x = torch.randn(2, 4, 32, dtype=torch.float64)
    middle = x + 1e-6 * block.attn(block.norm1(x))
    expected = middle + 1e-6 * block.mlp(block.norm2(middle))
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-12)
    assert not torch.equal(block(x), x)


def near(value):
    return pytest.approx(value, rel=0.05)


def eight_blocks(residual):
    """The fourth of eight blocks, beside which there are two of class attention."""
    return small(embed_dim=128, depth=8, talking_heads=False, residual=residual).blocks[3]


def test_the_weights_of_fixup_follow_its_paper():
    plain = eight_blocks("plain")
    fixup = eight_blocks("fixup")
    branches = 2 * (8 + 2)
    for name in ("attn.qkv.weight", "mlp.fc1.weight"):
        usual = plain.get_parameter(name).std().item()
        assert fixup.get_parameter(name).std().item() == near(usual * branches**-0.5)
    assert not fixup.attn.proj.weight.any()
    assert not fixup.mlp.fc2.weight.any()
    biases = ["attn.bias_qkv", "attn.bias_proj", "mlp.bias_fc1", "mlp.bias_act", "mlp.bias_fc2"]
    more = {"gamma_1", "gamma_2", *(f"{name}.bias" for name in biases)}
    assert fixup.state_dict().keys() - plain.state_dict().keys() == more


def test_the_weights_of_t_fixup_follow_its_paper():
    block = eight_blocks("t-fixup")
    factor = 0.67 * (8 + 2) ** -0.25
    xavier = (2 / (128 + 128)) ** 0.5
    q, k, v = block.attn.qkv.weight.chunk(3)
    assert q.std().item() == near(xavier)
    assert k.std().item() == near(xavier)
    assert v.std().item() == near(xavier * factor)
    assert block.mlp.fc1.weight.std().item() == near((2 / (128 + 512)) ** 0.5 * factor)


@over_table(__file__, "choices")
def test_every_choice_takes_a_step(fields):
    model = small(depth=3, **fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images = torch.randn(8, 3, 32, 32)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), torch.arange(8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_maps_of_cosine_attention_are_torchs_cosine_similarity():
    attention = small(depth=1, attention="cosine", talking_heads=False).blocks[0].attn
    x = torch.randn(2, 5, 32)
    q, k, _ = attention.qkv(x).reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    expected = cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).softmax(-1)
    assert torch.allclose(attention.maps(x), expected, atol=1e-5)


@over_table(__file__, "maps")
def test_the_maps_on_request_are_those_that_weigh_the_values(fields):
    model = small(depth=1, **fields).eval()
    attention = model.blocks[0].attn
    x = torch.randn(2, 16, 32)
    v = attention.qkv(x).chunk(3, dim=-1)[2]
    torch.testing.assert_close(weighed(attention, attention.maps(x), v), attention(x))

    attention = model.blocks_token_only[0].attn
    z = torch.randn(2, 17, 32)
    v = attention.v(z if model.config.cls_in_keys else z[:, 1:])
    torch.testing.assert_close(weighed(attention, attention.maps(z), v), attention(z))


def weighed(attention, maps, v):
    """What attention gives by its maps [B, h, queries, keys] and values [B, keys, d]."""
    heads = v.unflatten(-1, (4, 8)).transpose(1, 2)
    return attention.proj((maps @ heads).transpose(1, 2).flatten(2))


def test_batch_norm_over_all_processes_keeps_its_channels():
    """Without other processes it is torch's batch norm."""
    model = small(depth=2, norm="batchnorm").train()
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(deepcopy(model))
    kinds = {type(part).__name__ for part in synced.modules()}
    assert "SyncBatchNorm" in kinds
    assert not any(kind.startswith("BatchNorm") for kind in kinds)
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(synced(images), model(images))
    torch.testing.assert_close(dict(synced.state_dict()), dict(model.state_dict()))
