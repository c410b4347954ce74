"""The network against timm's, which loads the released weights."""

import pytest
import timm
import torch
from timm.layers import DropPath as TimmDropPath

import cait
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.model.residual import DropPath

# Parameters at 224 with 1,000 classes, as measured on the released code.
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
IN_TIMM = {
    "xxs24": "cait_xxs24_224",
    "xxs36": "cait_xxs36_224",
    "xs24": "cait_xs24_384",
    "s24": "cait_s24_224",
    "s36": "cait_s36_384",
    "m36": "cait_m36_384",
    "m48": "cait_m48_448",
}


def pair(drop_path_rate: float = 0.0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """timm's XXS-24 and ours with the same weights; λ is set near 1, else the branches would hardly count."""
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224", drop_path_rate=drop_path_rate)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "gamma" in name:
                parameter.uniform_(0.5, 1.0)
    ours = cait.create_model("xxs24", drop_path_rate=drop_path_rate)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
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


def test_drop_path_draws_and_scales_as_timms() -> None:
    branch = torch.randn(64, 5, 7)
    results = []
    for layer in (DropPath(0.25), TimmDropPath(0.25)):
        torch.manual_seed(3)
        results.append(layer(branch))
    assert torch.equal(*results)
    dropped = (results[0] == 0).flatten(1).all(1)
    assert 0 < dropped.sum() < 64
    assert torch.equal(DropPath(0.25).eval()(branch), branch)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = cait.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", IN_TIMM)
def test_names_order_and_shapes_are_timms(name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(IN_TIMM[name])
        ours = cait.create_model(name, img_size=int(IN_TIMM[name][-3:]))
    expected = [(key, value.shape) for key, value in theirs.state_dict().items()]
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == expected


def test_initial_weights_follow_timms_distribution() -> None:
    torch.manual_seed(0)
    theirs, ours = timm.create_model("cait_xxs36_224"), cait.create_model("xxs36")
    for (name, expected), (_, got) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        if expected.std() == 0 or expected.numel() == 1:  # constants: biases, norms, λ
            assert torch.equal(expected, got), name
        elif expected.numel() > 2000:
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert got.mean().item() == pytest.approx(expected.mean().item(), abs=0.002), name


@pytest.mark.parametrize(("depth", "epsilon"), [(6, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6)])
def test_layer_scale_starts_at_the_epsilon_of_the_depth(depth: int, epsilon: float) -> None:
    with torch.device("meta"):
        config = cait.create_model("s36", depth=depth).config
    assert config.epsilon == epsilon
    assert cait.create_model("xxs24", depth=depth, embed_dim=8, num_heads=2).blocks[0].gamma_1[0] == epsilon
    with torch.device("meta"):
        assert cait.create_model("xxs36").config.epsilon == 1e-5  # the released exception


def test_paper_rate_of_stochastic_depth_unless_given() -> None:
    with torch.device("meta"):
        assert cait.create_model("s36").blocks[7].drop_path.rate == 0.2
        assert cait.create_model("s36", drop_path_rate=0.0).blocks[7].drop_path.rate == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(name="xxl"), "xxs24"),
        (dict(name="xxs24", depht=3), "did you mean depth"),
        (dict(name="xxs24", img_size=225), "multiple of patch_size"),
        (dict(name="xxs24", num_heads=5), "multiple of num_heads"),
        (dict(name="xxs24", drop_path_rate=1.0), "[0, 1)"),
        (dict(name="xxs24", depth=-1), "depth"),
        (dict(name="xxs24", embed_dim="big"), "embed_dim"),
    ],
)
def test_bad_settings_are_told(arguments: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        cait.create_model(**arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_image_size_is_told() -> None:
    model = cait.create_model("xxs24", img_size=32, depth=1)
    with pytest.raises(UserError, match="32×32"):
        model(torch.zeros(1, 3, 48, 48))


def test_bfloat16_autocast_stays_near_float32() -> None:
    _, ours = pair()
    ours.eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        reference = ours(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = ours(images)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - reference).norm() / reference.norm() < 0.05
