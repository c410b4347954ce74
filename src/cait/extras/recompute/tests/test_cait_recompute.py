"""Attention that computes its maps again in the backward pass, against the reference."""

from functools import partial

import pytest
import torch
from cait_attention_cases import DEVICE, attention_case, attention_results
from harness import over_table, slow
from networks import saved_bytes, step

from cait import create_model, plugins
from cait.errors import UserError
from cait.extras.recompute.backward import TalkingHeads, gelu_linear
from cait.model.attention import backend_named
from cait.model.cait import Mlp
from cait.model.config import CaiTConfig

FIELDS = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3, layer_scale_init=0.5)


def errors(case, backend):
    """Of the output and each gradient, beside the reference in float64. proj_l's bias cancels: it is left out."""
    exact = attention_results([tensor.double() for tensor in case], "reference")
    results = attention_results(case, backend)
    shares = []
    for index in (0, 1, 2, 4, 5):
        error = torch.dist(results[index].double(), exact[index])
        shares.append(float(error / exact[index].norm().clamp(min=1e-6)))
    return shares


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("heads", [4, 6, 8, 16])
@pytest.mark.parametrize("N", [1, 7, 197, *slow(196, 576, 784)])
def test_recomputing_attention_is_the_reference(heads, N, dtype, tolerance):
    case = attention_case(heads, N, dtype, batch=1 if N > 500 else 2)
    assert max(errors(case, "recompute")) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_precision_is_lost_it_loses_no_more_than_the_reference(dtype):
    """In float16 q·k passes 65504 here, and scale · q·k does not: timm, which scales first, trains on."""
    case = attention_case(4, 40, dtype)
    if dtype == torch.float16:
        case[0][:, :, :2] *= 100
        q, k, _ = case[0].double().unbind(2)
        assert (q * k).sum(-1).abs().max() > 1.1e5
    assert all(tensor.isfinite().all() for tensor in attention_results(case, "recompute"))
    for ours, plain in zip(errors(case, "recompute"), errors(case, "reference"), strict=True):
        assert ours <= 1.5 * plain + 4e-3


def test_recomputing_attention_passes_gradcheck():
    case = attention_case(3, 5, torch.float64, k=4)[:5]
    for index in (0, 1, 3, 4):  # bias_l's gradient is 0, which differences only come near
        case[index].requires_grad_()
    assert torch.autograd.gradcheck(TalkingHeads.apply, (*case, 0.5))


@over_table(__file__, "shares")
def test_recomputing_keeps_one_map_of_three(N, share):
    size = 4 * N * N * 2  # bytes of a map of bfloat16
    qkv, *mixers = attention_case(4, N, torch.bfloat16, batch=1)[:5]
    leaves = [qkv.requires_grad_(), *(mixer.float().requires_grad_() for mixer in mixers)]

    def kept(backend, least=0):
        with torch.autocast(DEVICE, torch.bfloat16):
            return saved_bytes(partial(backend_named(backend), *leaves, 0.1), least)

    assert kept("recompute", size) == size
    assert kept("recompute") / kept("reference") == pytest.approx(share, abs=0.005)


def test_gelu_is_computed_again_and_not_kept():
    mlp = Mlp(CaiTConfig())
    assert mlp.gelu_linear is gelu_linear
    x = torch.randn(2, 400, mlp.fc1.in_features)
    size = 4 * 2 * 400 * mlp.fc1.out_features
    assert saved_bytes(partial(mlp, x), least=size) == size


def test_a_network_that_names_no_backend_takes_it_and_without_the_extra_the_reference(monkeypatch):
    network = create_model("xxs24", **FIELDS).double()
    monkeypatch.setattr(plugins, "extras", dict)
    plain = create_model("xxs24", **FIELDS).double()
    plain.load_state_dict(network.state_dict())
    assert network.blocks[0].attn.attention_backend == "recompute"
    assert plain.blocks[0].attn.attention_backend == "reference"
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(step(network, images, 0), step(plain, images, 0))
    with pytest.raises(UserError, match="attention_backend"):
        create_model("xxs24", **FIELDS, attention_backend="recompute")


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_network_is_traced_with_and_without_gradients(with_gradients):
    network = create_model("xxs24", **FIELDS).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.set_grad_enabled(with_gradients):
        traced = torch.jit.trace(network, images)
    assert torch.allclose(traced(images), network(images), atol=1e-5)
