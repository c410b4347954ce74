"""The network against timm's, which loads the released weights; the ten models."""

import pytest
import timm
import torch
from harness import slow
from timm.models.cait import ClassAttn
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import cait
from cait import plugins
from cait.errors import UserError
from cait.model.attention import SelfAttention
from cait.model.config import CaiTConfig
from cait.model.residual import gelu_linear, scaled_linear
from cait.train.optim import param_groups

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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), *slow((torch.float32, 1e-5))]
)
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
        # and no parameter without a gradient
        assert torch.allclose(ours, reference, rtol=0, atol=1e-10)
    assert torch.equal(block.eval()(x[:1]), block(x)[:1])


def test_parameter_counts_and_the_papers_rates() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(weight.numel() for weight in cait.create_model(name).parameters())
            for name in PARAMETERS
        }
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
    for (name, expected), (_, got) in zip(
        theirs.named_parameters(), ours.named_parameters(), strict=True
    ):
        if expected.std() == 0 or expected.numel() == 1:  # constants: biases, norms, λ
            assert torch.equal(expected, got), name
        elif expected.numel() > 2000:
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert got.mean().item() == pytest.approx(expected.mean().item(), abs=0.002), name


def test_wrong_image_size_is_told() -> None:
    model = cait.create_model("xxs24", img_size=32, depth=1)
    with pytest.raises(UserError, match="32×32"):
        model(torch.zeros(1, 3, 48, 48))


def test_the_maps_on_request_are_those_that_weigh_the_values() -> None:
    torch.manual_seed(0)
    model = cait.create_model("xxs24", 32, depth=1, embed_dim=48, patch_size=8).eval()
    attn, class_attn = model.blocks[0].attn, model.blocks_token_only[0].attn
    x = torch.randn(2, 16, 48)
    v = attn.qkv(x).view(2, 16, 3, 4, 12)[:, :, 2].transpose(1, 2)
    torch.testing.assert_close(attn.proj((attn.maps(x) @ v).transpose(1, 2).flatten(2)), attn(x))
    z = torch.randn(2, 17, 48)
    v = class_attn.v(z).unflatten(-1, (4, 12)).transpose(1, 2)
    torch.testing.assert_close(
        class_attn.proj((class_attn.maps(z) @ v).transpose(1, 2).flatten(2)), class_attn(z)
    )


# of gamma: none, a scalar, a channel
@pytest.mark.parametrize(("width", "tokens"), [(0, 3), (1, 3), (5, 1), (5, 3)])
@pytest.mark.parametrize("gelu", [False, True])
def test_gamma_taken_into_the_weights_is_gamma_times_the_layer(
    width: int, tokens: int, gelu: bool
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 5).double()
    x = torch.randn(2, tokens, 4, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(width, dtype=torch.float64, requires_grad=True) if width else None
    expected = linear(torch.nn.functional.gelu(x) if gelu else x) * (1 if gamma is None else gamma)
    got = scaled_linear(linear, x, gamma, gelu_linear if gelu else torch.nn.functional.linear)
    torch.testing.assert_close(got, expected)
    leaves = [x, linear.weight, linear.bias, *([gamma] if width else [])]
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, expected)]
    torch.testing.assert_close(*gradients)


def test_a_small_gamma_does_not_vanish_in_float16() -> None:
    linear = torch.nn.Linear(4, 5).half()
    torch.nn.init.constant_(linear.weight, 0.02)
    out = scaled_linear(linear, torch.full((1, 3, 4), 50.0).half(), torch.full((5,), 1e-6))
    torch.testing.assert_close(
        out.double(), 1e-6 * (4.0 + linear.bias.double()).expand(1, 3, 5), rtol=1e-2, atol=0
    )


SMALL = dict(name="s24", img_size=32, embed_dim=32, num_heads=4, num_classes=10, drop_path_rate=0.0)


def test_class_attention_is_timms() -> None:
    torch.manual_seed(0)
    block = cait.create_model(**SMALL, depth=1, layer_scale_init=0.5).double().blocks_token_only[0]
    z = torch.randn(2, 6, 32, dtype=torch.float64)
    theirs = ClassAttn(32, num_heads=4, qkv_bias=True).double()
    theirs.load_state_dict(block.attn.state_dict())
    assert torch.allclose(block.attn(z), theirs(z), rtol=0, atol=1e-12)
    middle = z[:, :1] + 0.5 * block.attn(block.norm1(z))
    assert torch.allclose(
        block(z[:, 1:], z[:, :1]), middle + 0.5 * block.mlp(block.norm2(middle)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(drop_path_mode="msk"), "drop_path_mode must be one of mask, skip, got 'msk'"),
        (dict(qkv_bias="yes"), "true or false"),
        (dict(depth_token_only=0), "depth_token_only must be at least 1, got 0"),
        (dict(layer_scale_init="1e-5"), "layer_scale_init must be a number"),
        (dict(depht=3), "did you mean depth"),
        (dict(img_size=225), "multiple of patch_size"),
        (dict(num_heads=5), "multiple of num_heads"),
        (dict(drop_path_rate=1.0), r"\[0, 1\)"),
        (dict(depth=-1), "depth must be at least 0, got -1"),
        (dict(attention_backend="fusd"), "attention_backend must be one of default, reference"),
    ],
)
def test_choices_that_cannot_be_are_told(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        cait.create_model("s24", **fields)
    with pytest.raises(UserError, match="unknown model 'xxl'; choose one of xxs24"):
        cait.create_model("xxl")
    with pytest.raises(UserError, match="unknown model 'xxs25'; did you mean xxs24"):
        cait.create_model("xxs25")


@pytest.mark.parametrize("field", ["residal", "residual"])
def test_a_field_that_nothing_here_has_is_told(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an extra that has been deleted."""
    monkeypatch.setattr(plugins, "extras", dict)
    with pytest.raises(
        UserError,
        match=f"the network is a CaiT: unknown model field '{field}'; choose from attention_backend, depth",
    ):
        cait.create_model("xxs24", **{field: "plain"})


def named_groups(
    model: torch.nn.Module, groups: list[dict]
) -> list[tuple[float, float, list[str]]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        (g["weight_decay"], g.get("lr_scale", 1.0), [names[id(p)] for p in g["params"]])
        for g in groups
    ]


def test_groups_are_timms() -> None:
    theirs, ours = timm.create_model("cait_xxs24_224"), cait.create_model("xxs24")
    exempt = theirs.no_weight_decay()
    for layer_decay, expected in (
        (None, param_groups_weight_decay(theirs, 0.05, no_weight_decay_list=exempt)),
        (0.7, param_groups_layer_decay(theirs, 0.05, exempt, layer_decay=0.7)),
    ):
        assert named_groups(ours, param_groups(ours, 0.05, layer_decay)) == named_groups(
            theirs, expected
        )


def test_an_export_has_the_operations_of_the_reference_whatever_computes_in_training() -> None:
    def operations(backend: str) -> list[str]:
        config = CaiTConfig(embed_dim=16, num_heads=2, attention_backend=backend)
        exported = torch.export.export(SelfAttention(config).eval(), (torch.randn(2, 5, 16),))
        return [str(node.target) for node in exported.graph.nodes]

    assert operations("default") == operations("reference")
