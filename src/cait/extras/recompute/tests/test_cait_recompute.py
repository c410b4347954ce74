"""Attention that computes its maps again in the backward pass, against the reference."""

from functools import partial

import pytest
import torch
from cait_attention_cases import DEVICE, attention_case, attention_results
from networks import saved_bytes
from torch import Tensor

from cait import create_model, plugins
from cait.errors import UserError
from cait.extras.recompute.backward import TalkingHeads, gelu_linear
from cait.model.attention import SelfAttention, backend_named
from cait.model.cait import Mlp
from cait.model.config import CaiTConfig
from cait.model.residual import gelu_linear as plain_gelu_linear
from cait.model.residual import scaled_linear


def errors(case: list[Tensor], backend: str) -> list[float]:
    """Of the output and each gradient, beside the reference in float64. proj_l's bias cancels: it is left out."""
    exact = attention_results([tensor.double() for tensor in case], "reference")
    pairs = [*zip(attention_results(case, backend), exact, strict=True)]
    del pairs[3]
    return [((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs]


@pytest.mark.parametrize("heads", [4, 6, 8, 16])
@pytest.mark.parametrize(
    "N", [1, 7, 197, *(pytest.param(N, marks=pytest.mark.slow) for N in (196, 576, 784))]
)
def test_recomputing_attention_is_the_reference(heads: int, N: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        assert (
            max(errors(attention_case(heads, N, dtype, batch=1 if N > 500 else 2), "recompute"))
            <= tolerance
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_precision_is_lost_it_loses_no_more_than_the_reference(dtype: torch.dtype) -> None:
    """In float16 q·k passes 65504 here, and scale · q·k does not: timm, which scales first, trains on."""
    case = attention_case(4, 40, dtype)
    if dtype == torch.float16:
        case[0][:, :, :2] *= 100
        assert (case[0][:, :, 0].double() * case[0][:, :, 1].double()).sum(-1).abs().max() > 1.1e5
    assert all(tensor.isfinite().all() for tensor in attention_results(case, "recompute"))
    for ours, plain in zip(errors(case, "recompute"), errors(case, "reference"), strict=True):
        assert ours <= 1.5 * plain + 4e-3


def test_recomputing_attention_passes_gradcheck() -> None:
    qkv, weight_l, bias_l, weight_w, bias_w, _ = attention_case(3, 5, torch.float64, k=4)
    # bias_l's gradient is 0, which differences only come near
    for tensor in (
        qkv,
        weight_l,
        weight_w,
        bias_w,
    ):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        TalkingHeads.apply, (qkv, weight_l, bias_l, weight_w, bias_w, 0.5)
    )


def test_what_has_no_numbers_takes_the_plain_operations() -> None:
    attention, qkv = (
        SelfAttention(CaiTConfig()),
        attention_case(4, 5, torch.float32)[0].cpu().requires_grad_(),
    )
    assert attention.attended(qkv).grad_fn.name() == "TalkingHeadsBackward"
    assert "TalkingHeads" not in attention.to("meta").attended(qkv.to("meta")).grad_fn.name()


@pytest.mark.parametrize(("N", "share"), [(196, 0.44), (576, 0.38)])
def test_recomputing_keeps_one_map_of_three(N: int, share: float) -> None:
    one = 4 * N * N * 2  # bytes of a map of bfloat16
    maps: dict[str, int] = {}
    whole: dict[str, int] = {}
    for backend in ("reference", "recompute"):
        qkv, *mixers = attention_case(4, N, torch.bfloat16, batch=1)[:5]
        leaves = [tensor.requires_grad_() for tensor in (qkv, *(mixer.float() for mixer in mixers))]
        with torch.autocast(DEVICE, torch.bfloat16):
            maps[backend] = saved_bytes(partial(backend_named(backend), *leaves, 0.1), least=one)
            whole[backend] = saved_bytes(partial(backend_named(backend), *leaves, 0.1))
    assert (maps["recompute"], maps["reference"]) == (one, 3 * one)
    assert whole["recompute"] / whole["reference"] == pytest.approx(share, abs=0.005)


def test_gelu_is_computed_again_and_not_kept() -> None:
    mlp = Mlp(CaiTConfig())
    x = torch.randn(2, 400, mlp.fc1.in_features)
    one = 4 * 2 * 400 * mlp.fc1.out_features
    assert saved_bytes(partial(mlp, x), least=one) == one


@pytest.mark.parametrize("with_gamma", [False, True])
def test_gelu_that_is_computed_again_has_the_same_gradients(with_gamma: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 5).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(5, dtype=torch.float64, requires_grad=True) if with_gamma else None
    outputs = [
        scaled_linear(linear, x, gamma, function) for function in (gelu_linear, plain_gelu_linear)
    ]
    leaves = [x, linear.weight, linear.bias, *([gamma] if with_gamma else [])]
    weights = torch.randn_like(outputs[0])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(
        *(torch.autograd.grad((out * weights).sum(), leaves) for out in outputs)
    )


def test_a_network_that_names_no_backend_takes_it() -> None:
    network = create_model("xxs24", 32, depth=1, embed_dim=32, num_heads=2)
    assert network.blocks[0].attn.attention_backend == "recompute"
    assert all(
        block.mlp.gelu_linear is gelu_linear
        for block in (*network.blocks, *network.blocks_token_only)
    )
    plain = create_model(
        "xxs24", 32, depth=1, embed_dim=32, num_heads=2, attention_backend="reference"
    )
    assert plain.blocks[0].attn.attention_backend == "reference"


def test_without_the_extra_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 32, 32)
    fields = dict(img_size=32, depth=1, embed_dim=32, num_heads=2)
    network = create_model("xxs24", **fields)
    monkeypatch.setattr(plugins, "extras", dict)
    plain = create_model("xxs24", **fields)
    assert plain.blocks[0].attn.attention_backend == "reference"
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(plain.eval()(images), network.eval()(images))
    with pytest.raises(
        UserError, match="attention_backend must be one of default, reference, got 'recompute'"
    ):
        create_model("xxs24", **fields, attention_backend="recompute")


def test_a_network_is_traced_with_and_without_gradients() -> None:
    network = create_model("xxs24", img_size=32, depth=2, num_classes=3).eval()
    images = torch.randn(2, 3, 32, 32)
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            traced = torch.jit.trace(network, images)
        assert torch.allclose(traced(images), network(images), atol=1e-5)
