"""The network against timm's, which loads the released weights."""

from typing import Any

import pytest
import timm
import torch
from attention_cases import attention_case
from harness import slow
from networks import network, step
from timm.layers import DropPath as TimmDropPath
from torch.utils._python_dispatch import TorchDispatchMode

import cait
from cait import plugins
from cait.errors import UserError
from cait.model.config import VARIANTS
from cait.model.residual import DropPath, draw_samples, scaled_linear
from cait.model.talking_heads import Shape, attend

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


@pytest.mark.parametrize("mode", ["skip", "subset"])
@pytest.mark.parametrize("rate", [0.25, 0.97])  # at .97 the draw of "skip" is empty
def test_skipping_work_is_multiplying_by_zero(mode: str, rate: float) -> None:
    torch.manual_seed(0)
    fields: dict = dict(img_size=32, embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.7)
    block = cait.create_model("s24", drop_path_rate=rate, drop_path_mode=mode, **fields).blocks[0].double()
    x = torch.randn(9, 4, 32, dtype=torch.float64, requires_grad=True)

    def mask(B: int) -> torch.Tensor:
        """The factor of each image, from the draw that the block makes."""
        factors = torch.zeros(B, dtype=torch.float64)
        if mode == "subset":
            count = max(1, round((1 - rate) * B))
            factors[torch.randperm(B)[:count]] = B / count
        else:
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


class Operations(TorchDispatchMode):
    """The names of the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.add(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", ["skip", "subset"])
def test_taking_images_sorts_nothing_and_has_the_bits_that_indexing_had(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randn(16, 3, 32, 32)
    with Operations() as computed:
        ours = step(network(mode), images, 3)
    # index_put, which indexing has in its backward pass, sorts the indices on CUDA.
    assert not [name for name in computed.names if "index_put" in name]
    monkeypatch.setattr(cait.model.residual, "sampled", lambda x, sample: x if sample is None else x[sample[0]])
    assert all(map(torch.equal, ours, step(network(mode), images, 3)))


def test_samples_are_on_the_device_of_the_images() -> None:
    ((indices, factor),) = draw_samples([DropPath(0.5, "subset")], torch.zeros(4, 2, device="meta"))
    assert indices.device.type == factor.device.type == "meta"


@pytest.mark.parametrize("mode", ["mask", "skip", "subset"])
def test_expectation_and_variance_of_stochastic_depth(mode: str) -> None:
    torch.manual_seed(0)
    layer, B, draws = DropPath(0.25, mode), 8, 4000
    factors = torch.zeros(draws, B)
    for row in factors:
        (kept,) = draw_samples([layer], row)
        row.copy_(layer(torch.ones(B)) if kept is None else torch.zeros(B).index_put(kept[:1], kept[1]))
    variance = 0.25 / 0.75  # of one image: (1 - keep) / keep
    assert factors.mean(0) == pytest.approx([1.0] * B, abs=0.05)
    assert factors.var(0) == pytest.approx([variance] * B, abs=0.06)
    # The mean over the batch varies by a B-th of that, and not at all where the number is fixed.
    assert factors.mean(1).var().item() == pytest.approx(0 if mode == "subset" else variance / B, abs=0.005)


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


@pytest.mark.parametrize("width", [0, 1, 5])  # of gamma: none, a scalar, one a channel
@pytest.mark.parametrize("tokens", [1, 3])
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


class SlowBackend:
    """What an extra may add."""

    def refusal(self, shape: Shape) -> str | None:
        return "at least 2 heads" if shape.heads < 2 else None

    def __call__(self, qkv: torch.Tensor, *weights: Any) -> torch.Tensor:
        return 2 * qkv[:, :, 2].flatten(2)


@pytest.fixture
def slow_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "merged", lambda kind: {"slow": f"{__name__}:SlowBackend"})


def test_an_extra_adds_a_backend(slow_backend: None) -> None:
    fields = dict(patch_size=8, embed_dim=32, num_heads=2, depth=1)
    network = cait.create_model("xxs24", 16, 10, attention_backend="slow", **fields)
    given = attention_case(2, 5, torch.float32)[:3]
    assert torch.equal(attend(*given, 0.5, "slow"), 2 * given[0][:, :, 2].flatten(2))
    assert {block.attn.backend for block in network.blocks} == {"slow"}
    with pytest.raises(UserError, match="attention_backend slow needs at least 2 heads; take auto or reference"):
        attend(*attention_case(1, 5, torch.float32)[:3], 0.5, "slow")


def test_auto_recomputes_but_for_what_is_exported_or_has_no_numbers() -> None:
    qkv, proj_l, proj_w, _ = attention_case(2, 5, torch.float32)
    given = qkv, proj_l, proj_w, 0.5
    assert attend(*given).grad_fn.name() == "TalkingHeadsBackward"
    assert torch.equal(attend(*given), attend(*given, "recompute"))
    assert "TalkingHeads" not in attend(*given, "reference").grad_fn.name()
    meta = [part.to("meta") for part in given[:3]]
    assert "TalkingHeads" not in attend(*meta, 0.5).grad_fn.name()


def test_a_backend_of_an_absent_extra_gives_way_to_auto(slow_backend: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "merged", lambda kind: {})
    fields = dict(patch_size=8, embed_dim=32, num_heads=2, depth=1)
    with pytest.warns(UserWarning, match="gone is none of auto, reference, recompute: auto takes its place"):
        network = cait.create_model("xxs24", 16, 10, attention_backend="gone", **fields)
    assert network.config.attention_backend == "auto"
    network(torch.zeros(1, 3, 16, 16))
