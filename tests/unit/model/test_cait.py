"""The parts of CaiT by their equations. tests/oracle/test_cait_timm.py compares the whole with timm's."""

import pytest
import torch
from harness import over_table
from torch import nn
from torch.nn.functional import gelu, linear
from torch.testing import assert_close

import cait
from cait import plugins
from cait.errors import UserError
from cait.model.attention import ClassAttention, SelfAttention
from cait.model.config import CaiTConfig
from cait.model.residual import gelu_linear, scaled_linear


def with_gradients(output, leaves):
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("rate", [0.25, 0.97])  # at .97 the draw is empty
def test_skipping_work_is_multiplying_by_zero(rate):
    torch.manual_seed(0)
    fields = dict(embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.7)
    block = cait.create_model("s24", 32, drop_path_rate=rate, **fields).blocks[0].double()
    x = torch.randn(9, 4, 32, dtype=torch.float64, requires_grad=True)

    def drop(branch):
        """Each image times its factor, from the draw that the block makes."""
        kept = torch.rand(len(branch)) < 1 - rate
        return branch * (kept.double() / (1 - rate))[:, None, None]

    def multiplied(x):
        x = x + drop(block.gamma_1 * block.attn(block.norm1(x)))
        return x + drop(block.gamma_2 * block.mlp(block.norm2(x)))

    results = []
    for function in (block, multiplied):
        torch.manual_seed(1)
        results.append(with_gradients(function(x), [x, *block.parameters()]))
    assert_close(*results, rtol=0, atol=1e-10)
    assert torch.equal(block.eval()(x[:1]), block(x)[:1])


def test_the_maps_on_request_are_those_that_weigh_the_values():
    torch.manual_seed(0)
    config = CaiTConfig(embed_dim=48)
    attention, class_attention = SelfAttention(config), ClassAttention(config)
    x = torch.randn(2, 17, 48)
    values = attention.qkv(x)[..., 96:], class_attention.v(x)
    for layer, v in zip((attention, class_attention), values, strict=True):
        weighted = layer.maps(x) @ v.unflatten(-1, (4, 12)).transpose(1, 2)
        assert_close(layer.proj(weighted.transpose(1, 2).flatten(2)), layer(x))


@over_table(__file__, "gammas")
@pytest.mark.parametrize("with_gelu", [False, True])
def test_gamma_taken_into_the_weights_is_gamma_times_the_layer(width, tokens, with_gelu):
    torch.manual_seed(0)
    layer = nn.Linear(4, 5).double()
    x = torch.randn(2, tokens, 4, dtype=torch.float64, requires_grad=True)
    leaves = [x, layer.weight, layer.bias]
    expected = layer(gelu(x) if with_gelu else x)
    gamma = None
    if width:
        gamma = torch.randn(width, dtype=torch.float64, requires_grad=True)
        leaves.append(gamma)
        expected = gamma * expected
    output = scaled_linear(layer, x, gamma, gelu_linear if with_gelu else linear)
    assert_close(with_gradients(output, leaves), with_gradients(expected, leaves))


def test_a_small_gamma_does_not_vanish_in_float16():
    layer = nn.Linear(4, 5, dtype=torch.float16)
    nn.init.constant_(layer.weight, 0.02)
    nn.init.zeros_(layer.bias)
    x = torch.full((1, 3, 4), 50.0, dtype=torch.float16)
    output = scaled_linear(layer, x, torch.full((5,), 1e-6))
    assert_close(output.double(), torch.full((1, 3, 5), 4e-6).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("field", ["residal", "residual"])
def test_a_field_of_an_extra_that_is_not_here_is_refused(field, monkeypatch):
    monkeypatch.setattr(plugins, "extras", dict)
    with pytest.raises(UserError, match=f"{field}.*attention_backend, depth"):
        cait.create_model("xxs24", **{field: "plain"})


def test_an_export_has_the_operations_of_the_reference_whatever_computes_in_training():
    def operations(backend):
        config = CaiTConfig(embed_dim=16, num_heads=2, attention_backend=backend)
        exported = torch.export.export(SelfAttention(config).eval(), (torch.randn(2, 5, 16),))
        return [str(node.target) for node in exported.graph.nodes]

    assert operations("default") == operations("reference")
