"""The paper's ablations: DeiT against timm's, the rivals of LayerScale by their papers, and a step of each."""

from pathlib import Path

import pytest
import timm
import torch

import cait
from cait.errors import UserError
from cait.model.config import config_class
from cait.model.weights import load_weights

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


@pytest.mark.parametrize(
    ("fields", "timms"),
    [
        (dict(class_token_at=0), {}),
        (dict(global_pool="avg"), dict(global_pool="avg", class_token=False, fc_norm=False)),
    ],
)
def test_deit_falls_out(fields: dict, timms: dict) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("deit_small_patch16_224", **timms).eval()
    ours = cait.create_model(**DEIT_S, **fields).eval()
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
        assert weight.std().item() == pytest.approx(
            reference.std().item() * branches**-0.5, rel=0.05
        )
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
    assert t_fixup.blocks[3].mlp.fc1.weight.std().item() == pytest.approx(
        (2 / 640) ** 0.5 * factor, rel=0.05
    )


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


def test_cosine_scores() -> None:
    torch.manual_seed(0)
    attention = (
        cait.create_model(**SMALL, depth=1, attention="cosine", talking_heads=False).blocks[0].attn
    )
    x = torch.randn(2, 5, 32)
    q, k, v = attention.qkv(x).reshape(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    maps = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).softmax(
        -1
    )
    assert torch.allclose(
        attention(x), attention.proj((maps @ v).transpose(1, 2).flatten(2)), atol=1e-5
    )


@pytest.mark.parametrize(
    "fields", [{"attention": "cosine"}, {"talking_heads": False}, {"cls_in_keys": False}]
)
def test_the_maps_on_request_are_those_that_weigh_the_values(fields: dict) -> None:
    torch.manual_seed(0)
    model = cait.create_model("xxs24", 32, depth=1, embed_dim=48, patch_size=8, **fields).eval()
    attn, class_attn = model.blocks[0].attn, model.blocks_token_only[0].attn
    x = torch.randn(2, 16, 48)
    v = attn.qkv(x).view(2, 16, 3, 4, 12)[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(attn.proj((attn.maps(x) @ v).transpose(1, 2).flatten(2)), attn(x))
    z = torch.randn(2, 17, 48)
    v = (
        class_attn.v(z if model.config.cls_in_keys else z[:, 1:])
        .unflatten(-1, (4, 12))
        .transpose(1, 2)
    )
    torch.testing.assert_close(
        class_attn.proj((class_attn.maps(z) @ v).transpose(1, 2).flatten(2)), class_attn(z)
    )


def test_batch_norm_over_all_processes_keeps_its_channels() -> None:
    torch.manual_seed(0)
    model = cait.create_model(
        "xxs24", 32, 7, 0.0, embed_dim=32, depth=2, num_heads=2, norm="batchnorm"
    ).train()
    images = torch.randn(4, 3, 32, 32)
    expected = model(images)
    states = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(
        {key: torch.zeros_like(v) if "running" in key else v for key, v in states.items()}
    )
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    norms = [
        part for part in synced.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
    ]
    assert norms
    assert all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert synced.state_dict().keys() == states.keys()
    for norm in norms:
        norm.reset_running_stats()
    # without other processes it is torch's batch norm
    torch.testing.assert_close(synced(images), expected)
    for key, value in synced.state_dict().items():
        torch.testing.assert_close(value, states[key])


def test_positions_with_a_class_token_are_not_resized(tmp_path: Path) -> None:
    fields = dict(
        name="xxs24",
        num_classes=7,
        depth=1,
        embed_dim=16,
        num_heads=2,
        class_token_at=0,
        patch_size=4,
    )
    torch.save(cait.create_model(**fields, img_size=8).state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"pos_embed is .1, 5, 16. in it, .1, 17, 16. in the model"):
        load_weights(cait.create_model(**fields, img_size=16), tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(talking_heads="yes"), "true or false"),
        (dict(class_token_at=24), "one of the 24 blocks"),
        (dict(global_pool="avg"), "depth_token_only must be 0"),
        (dict(depth_token_only=0, talking_heads=False), "the class token is never updated"),
    ],
)
def test_choices_that_cannot_be_are_told(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        cait.create_model("s24", **fields)


def test_fields_of_several_extras_make_one_network() -> None:
    pytest.importorskip("cait.extras.recipe.stem")
    assert config_class(["depth"]).__name__ == "CaiTConfig"
    model = cait.create_model(**SMALL, depth=1, stem="conv", residual="none", cls_in_keys=False)
    assert type(model.patch_embed).__name__ == "ConvStem"
    assert type(model.blocks[0]).__name__ == "AblatedSelfAttentionBlock"
    with pytest.raises(UserError, match="stem must be one of"):
        cait.create_model(**SMALL, depth=1, stem="cnv", residual="none")
