"""The network against timm's, which loads the released weights; the ten models, the stems and the ablations."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import timm.models.xcit
import torch
from harness import slow
from networks import DEIT_S, step
from timm.models.cait import ClassAttn
from torch import nn

import cait
from cait.errors import UserError
from cait.model.cait import CaiT
from cait.model.residual import scaled_linear
from cait.model.weights import load_weights

# At 224 with 1,000 classes, as measured on the released code.
PARAMETERS = {
    "xxs24": 11_956_264,
    "xxs36": 17_299_720,
    "xs24": 26_560_648,
    "xs36": 38_557_432,
    "s24": 46_916_200,
    "s36": 68_220_712,
    "s48": 89_525_224,
    "m24": 185_850_088,
    "m36": 270_929_512,
    "m48": 356_008_936,
}


def pair(drop_path_rate: float = 0.0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """timm's XXS-24 and ours with the same weights; λ is set near 1, else the branches would hardly count."""
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224", drop_path_rate=drop_path_rate)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "gamma" in name:
                parameter.uniform_(0.5, 1.0)
    ours = cait.create_model("xxs24", drop_path_rate=drop_path_rate, drop_path_mode="mask")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), *slow((torch.float32, 1e-5))])
def test_logits_and_gradients_are_timms(dtype: torch.dtype, tolerance: float) -> None:
    theirs, ours = pair()
    theirs, ours = theirs.to(dtype).eval(), ours.to(dtype).eval()
    images = torch.randn(2, 3, 224, 224, dtype=dtype)
    expected, got = theirs(images), ours(images)
    assert expected.std() > 0.1
    assert (expected - got).abs().max() <= tolerance
    expected.square().sum().backward()
    got.square().sum().backward()
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        reference = theirs_by_name[name].grad
        # Relative to the tensor; proj_l's bias cancels in the softmax, its gradient is rounding alone.
        scale = reference.abs().max().clamp(min=1.0)
        assert (parameter.grad - reference).abs().max() <= 100 * tolerance * scale, name


def test_training_with_stochastic_depth_is_timms() -> None:
    theirs, ours = pair(drop_path_rate=0.3)
    images = torch.randn(4, 3, 224, 224)
    outputs = []
    for model in (theirs.train(), ours.train()):
        torch.manual_seed(1)
        outputs.append(model(images))
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-4
    torch.manual_seed(2)
    assert (ours(images) - outputs[1]).abs().max() > 1e-2


@pytest.mark.parametrize("rate", [0.25, 0.97])  # at .97 the draw is empty
def test_skipping_work_is_multiplying_by_zero(rate: float) -> None:
    torch.manual_seed(0)
    fields: dict = dict(img_size=32, embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.7)
    block = cait.create_model("s24", drop_path_rate=rate, **fields).blocks[0].double()
    x = torch.randn(9, 4, 32, dtype=torch.float64, requires_grad=True)

    def mask(B: int) -> torch.Tensor:
        """The factor of each image, from the draw that the block makes."""
        factors = torch.zeros(B, dtype=torch.float64)
        factors[torch.rand(B) < 1 - rate] = 1 / (1 - rate)
        return factors[:, None, None]

    torch.manual_seed(1)
    got = block(x)
    torch.manual_seed(1)
    middle = x + mask(9) * block.gamma_1 * block.attn(block.norm1(x))
    expected = middle + mask(9) * block.gamma_2 * block.mlp(block.norm2(middle))
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    leaves = (x, *block.parameters())
    weights = torch.randn_like(got)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, expected)]
    for ours, reference in zip(*gradients, strict=True):
        assert torch.allclose(ours, reference, rtol=0, atol=1e-10)  # and no parameter without a gradient
    assert torch.equal(block.eval()(x[:1]), block(x)[:1])


def test_parameter_counts_and_the_papers_rates() -> None:
    with torch.device("meta"):
        counts = {name: sum(weight.numel() for weight in cait.create_model(name).parameters()) for name in PARAMETERS}
        assert counts == PARAMETERS
        for depth, epsilon in ((6, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6)):
            assert cait.create_model("s36", depth=depth).config.epsilon == epsilon
        assert cait.create_model("xxs36").config.epsilon == 1e-5  # the released exception
        assert cait.create_model("xxs36", depth=48).config.epsilon == 1e-6
        assert cait.create_model("s36").blocks[7].drop_path.rate == 0.2
        assert cait.create_model("s36", drop_path_rate=0.0).blocks[7].drop_path.rate == 0.0


def test_initial_weights_follow_timms_distribution() -> None:
    torch.manual_seed(0)
    theirs, ours = timm.create_model("cait_xxs36_224"), cait.create_model("xxs36")
    for (name, expected), (_, got) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        if expected.std() == 0 or expected.numel() == 1:  # constants: biases, norms, λ
            assert torch.equal(expected, got), name
        elif expected.numel() > 2000:
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert got.mean().item() == pytest.approx(expected.mean().item(), abs=0.002), name


def test_wrong_image_size_is_told() -> None:
    model = cait.create_model("xxs24", img_size=32, depth=1)
    with pytest.raises(UserError, match="32×32"):
        model(torch.zeros(1, 3, 48, 48))


@pytest.mark.parametrize("fields", [{}, {"attention": "cosine"}, {"talking_heads": False}, {"cls_in_keys": False}])
def test_the_maps_on_request_are_those_that_weigh_the_values(fields: dict) -> None:
    torch.manual_seed(0)
    model = cait.create_model("xxs24", 32, depth=1, embed_dim=48, patch_size=8, **fields).eval()
    attn, class_attn = model.blocks[0].attn, model.blocks_token_only[0].attn
    x = torch.randn(2, 16, 48)
    v = attn.qkv(x).view(2, 16, 3, 4, 12)[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(attn.proj((attn.maps(x) @ v).transpose(1, 2).flatten(2)), attn(x))
    z = torch.randn(2, 17, 48)
    v = class_attn.v(z if class_attn.cls_in_keys else z[:, 1:]).unflatten(-1, (4, 12)).transpose(1, 2)
    torch.testing.assert_close(class_attn.proj((class_attn.maps(z) @ v).transpose(1, 2).flatten(2)), class_attn(z))


@pytest.mark.parametrize(("width", "tokens"), [(0, 3), (1, 3), (5, 1), (5, 3)])  # of gamma: none, a scalar, a channel
@pytest.mark.parametrize("gelu", [False, True])
def test_gamma_taken_into_the_weights_is_gamma_times_the_layer(width: int, tokens: int, gelu: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 5).double()
    x = torch.randn(2, tokens, 4, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(width, dtype=torch.float64, requires_grad=True) if width else None
    expected = linear(torch.nn.functional.gelu(x) if gelu else x) * (1 if gamma is None else gamma)
    got = scaled_linear(linear, x, gamma, gelu)
    torch.testing.assert_close(got, expected)
    leaves = [x, linear.weight, linear.bias, *([gamma] if width else [])]
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_a_small_gamma_does_not_vanish_in_float16() -> None:
    linear = torch.nn.Linear(4, 5).half()
    torch.nn.init.constant_(linear.weight, 0.02)
    out = scaled_linear(linear, torch.full((1, 3, 4), 50.0).half(), torch.full((5,), 1e-6))
    torch.testing.assert_close(out.double(), 1e-6 * (4.0 + linear.bias.double()).expand(1, 3, 5), rtol=1e-2, atol=0)


SMALL = dict(name="s24", img_size=32, embed_dim=32, num_heads=4, num_classes=10, drop_path_rate=0.0)
SHALLOW: dict = dict(embed_dim=32, depth=2, num_heads=2, layer_scale_init=1.0)


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


def with_stem(img_size: int = 32, patch_size: int = 8, stem: str = "conv", **fields: object) -> CaiT:
    torch.manual_seed(0)
    return cait.create_model("xxs24", img_size, 5, 0.1, stem=stem, patch_size=patch_size, **(SHALLOW | fields))


@pytest.mark.parametrize(("img_size", "patch_size"), [(16, 4), (28, 14), (20, 5), (4, 1)])
def test_any_patch_size_gives_as_many_tokens_as_the_patches(img_size: int, patch_size: int) -> None:
    images = torch.randn(2, 1, img_size, img_size)
    for stem in ("conv", "pooled", "patch"):
        model = with_stem(img_size, patch_size, stem, in_chans=1)
        assert model.patch_embed(images).shape == (2, model.config.num_patches, 32)
        assert model.patch_embed(images).is_contiguous()
        step(model, images, 0)
        assert all(p.grad.abs().sum() > 0 for p in model.patch_embed.parameters())


@pytest.mark.parametrize(("patch_size", "widths"), [(16, (16, 16, 32, 64)), (4, (32, 64))])
def test_the_pooled_stem_halves_by_pooling_from_the_second_convolution_on(patch_size: int, widths: tuple) -> None:
    stem = with_stem(64, patch_size, "pooled", embed_dim=64).patch_embed
    expected, before = nn.Sequential(), 3
    for width in widths:
        is_first = before == 3
        expected.extend(
            [nn.Conv2d(before, width, 3, 2 if is_first else 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        )
        expected.extend([] if is_first else [nn.MaxPool2d(2)])
        before = width
    expected.append(nn.Conv2d(64, 64, 1))
    expected.load_state_dict(dict(zip(expected.state_dict(), stem.state_dict().values(), strict=True)))
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
    for other, stem in ((with_stem(stem="patch"), "patch"), (with_stem(patch_size=4), "conv")):
        with pytest.raises(UserError, match=f"its stem or patch_size is another; this one's stem is {stem}"):
            load_weights(other, path)
