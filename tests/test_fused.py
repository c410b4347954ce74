"""The kernels of attention with talking heads: under Triton's interpreter here, compiled where there is a GPU.

Triton decides when it is imported whether it interprets, so the tests that run kernels do so in a
process of their own, which `test_the_kernels_under_the_interpreter` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import environment, python
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cait
from cait.errors import UserError
from cait.model.attention import talking_heads_attention

pytest.importorskip("triton", reason="Triton is not on this platform")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
runs = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run under Triton's interpreter, in another process")
on_gpu = pytest.mark.skipif(not CUDA, reason="no GPU here")

# A few shapes for the interpreter, which takes seconds for each and has no products of bfloat16; on a GPU the
# models' own shapes in bfloat16, and little else, for there each number of heads takes long to compile.
FEW = [(4, 1), (4, 196), (6, 50), (8, 7), (8, 197), (16, 20), (3, 33), (1, 130)]
MANY = [(h, N) for h in (4, 6, 8, 16) for N in (1, 7, 50, 196, 197, 576, 784)]


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels are tested here, not in another process")
def test_the_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__]
    done = subprocess.run(
        command, env=environment() | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:]


def case(heads: int, N: int, dtype: torch.dtype, k: int = 48, batch: int = 1) -> list[Tensor]:
    """qkv, W_l, b_l, W_w, b_w and the gradient of the output."""
    generator = torch.Generator().manual_seed(heads * 1000 + N)
    shapes = [(batch, N, 3, heads, k), *[(heads, heads), (heads,)] * 2, (batch, N, heads * k)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for tensor in tensors[1:5]:
        tensor *= heads**-0.5
    return [tensor.to(DEVICE, dtype) for tensor in tensors]


def results(given: list[Tensor], backend: str) -> list[Tensor]:
    """The output and the gradients of qkv, W_l, b_l, W_w and b_w."""
    qkv, weight_l, bias_l, weight_w, bias_w = (tensor.clone().requires_grad_() for tensor in given[:5])
    proj_l, proj_w = (torch.nn.Linear(len(bias_l), len(bias_l), device=DEVICE) for _ in range(2))
    proj_l.weight, proj_l.bias = torch.nn.Parameter(weight_l), torch.nn.Parameter(bias_l)
    proj_w.weight, proj_w.bias = torch.nn.Parameter(weight_w), torch.nn.Parameter(bias_w)
    out = talking_heads_attention(qkv, proj_l, proj_w, qkv.shape[-1] ** -0.5, backend)
    leaves = (qkv, proj_l.weight, proj_l.bias, proj_w.weight, proj_w.bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[5])]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(got, exact, strict=True)]


def no_less_exact(given: list[Tensor]) -> None:
    exact = results([tensor.double() for tensor in given], "reference")
    fused, plain = results(given, "fused"), results(given, "reference")
    for tensors in (fused, plain, exact):
        bias_l = tensors.pop(3)  # it cancels in the softmax: what the reference has there is rounding
        if tensors is fused:
            assert not bias_l.any()
    # The maps are rounded at most where the reference rounds them, so it loses no more than the reference
    # does, but for luck; and in float32, for the order of its sums, some last bits.
    few_bits = 4 * torch.finfo(torch.float32).eps
    for number, (error, of_plain) in enumerate(zip(errors(fused, exact), errors(plain, exact), strict=True)):
        assert error <= 1.2 * of_plain + few_bits, number


@runs
@pytest.mark.parametrize(("heads", "N"), FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_less_exact_than_the_reference(heads: int, N: int, dtype: torch.dtype) -> None:
    if (N > 100 and dtype == torch.float32) if INTERPRETED else heads != 4:
        pytest.skip("takes long for what it tells")
    no_less_exact(case(heads, N, dtype))


@on_gpu
@pytest.mark.parametrize(("heads", "N"), MANY)
def test_no_less_exact_compiled(heads: int, N: int) -> None:
    no_less_exact(case(heads, N, torch.bfloat16, batch=2))


@runs
@pytest.mark.parametrize("k", [8, 24, 64])
def test_any_width_and_any_layout(k: int) -> None:
    given = case(4, 20, torch.float32, k, batch=2)
    no_less_exact(given)
    expected = results(given, "fused")
    wide = torch.zeros(2, 25, 3, 4, k + 3, device=DEVICE)
    for view in (wide[:, 2:22, :, :, 1:-2], torch.zeros(20, 2, 3, 4, k, device=DEVICE).transpose(0, 1)):
        view.copy_(given[0])
        torch.testing.assert_close(fused_output(view, given), expected[0], rtol=0, atol=0)


def fused_output(qkv: Tensor, given: list[Tensor]) -> Tensor:
    from cait.model import fused

    return fused.talking_heads(qkv, *given[1:5], qkv.shape[-1] ** -0.5)[0]


@runs
def test_scores_far_from_zero() -> None:
    given = case(4, 40, torch.float16)
    given[0][:, :, :2] *= 12  # scores of hundreds, probabilities of 0 and 1
    no_less_exact(given)
    given[0][:, :, 0] = 30  # and all of a row far below 0, where what lies beyond the last key would win
    given[0][:, :, 1] = -30
    assert all(tensor.isfinite().all() for tensor in results(given, "fused"))


@runs
def test_the_same_bits_twice() -> None:
    given = case(4, 70, torch.float16, k=16, batch=2)
    for first, second in zip(results(given, "fused"), results(given, "fused"), strict=True):
        assert torch.equal(first, second)


@runs
def test_the_operators_keep_pytorchs_rules() -> None:
    from cait.model import fused

    qkv, *parameters, d_out = case(2, 5, torch.float32, k=16)
    inputs = [tensor.requires_grad_() for tensor in (qkv, *parameters)]
    torch.library.opcheck(fused.talking_heads, (*inputs, 0.25))
    _, lse = fused.talking_heads(*inputs, 0.25)
    weight_l, _, weight_w, bias_w = parameters
    given = [tensor.detach() for tensor in (d_out, qkv, lse, weight_l, weight_w, bias_w)]
    torch.library.opcheck(fused.talking_heads_backward, (*given, 0.25))


def network(backend: str = "fused") -> torch.nn.Module:
    torch.manual_seed(0)
    fields: dict = dict(patch_size=8, embed_dim=32, num_heads=2, depth=2, layer_scale_init=0.5)
    return cait.create_model("xxs24", 32, 10, 0.0, attention_backend=backend, **fields).to(DEVICE)


def step(model: torch.nn.Module, images: Tensor, call=None) -> list[Tensor]:
    model.zero_grad()
    logits = model(images) if call is None else call(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@runs
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_with_it_compiled_checkpointed_and_plain(autocast: bool) -> None:
    images = torch.randn(3, 3, 32, 32, device=DEVICE)
    model = network()
    with torch.autocast(DEVICE, torch.float16, enabled=autocast):
        expected = step(model, images)
        for ours, reference in zip(expected, step(network("reference"), images), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-2, atol=2e-3 if autocast else 1e-5)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        again = torch.nn.Sequential(model)
        for call in (compiled, lambda images: checkpoint(again, images, use_reentrant=False)):
            for ours, reference in zip(step(model, images, call), expected, strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-4 if autocast else 1e-6)


@runs
def test_no_map_is_kept() -> None:
    kept = []
    qkv, *parameters, _ = case(2, 100, torch.float32, k=16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        fused_output(qkv.requires_grad_(), [qkv, *parameters])
    assert 0 < max(kept) == qkv.numel() < 100 * 100


@pytest.mark.parametrize(
    ("heads", "k", "dtype", "words"),
    [
        (4, 48, torch.float64, "bfloat16, float16 or float32, not float64"),
        (17, 8, torch.float32, "16 heads"),
        (2, 65, torch.float32, "64 channels"),
        pytest.param(
            4, 48, torch.float32, "CUDA", marks=pytest.mark.skipif(CUDA or INTERPRETED, reason="there it runs")
        ),
    ],
)
def test_where_it_cannot_run_is_told(heads: int, k: int, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        results(case(heads, 5, dtype, k), "fused")
    assert "\n" not in str(caught.value)
    results(case(heads, 5, dtype, k), "auto")


def test_without_triton_it_is_told_and_all_else_runs() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, cait\n"
        "fields = dict(depth=1, embed_dim=32, num_heads=2)\n"
        "print(cait.create_model('xxs24', 32, **fields)(torch.zeros(1, 3, 32, 32)).shape)\n"
        "cait.create_model('xxs24', 32, attention_backend='fused', **fields)(torch.zeros(1, 3, 32, 32))"
    )
    done = python(code)
    assert "1000" in done.stdout, done.stderr
    assert "attention_backend fused needs Triton" in done.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["forward", "weights", "queries", "keys"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(name: str) -> None:
    from kernel import compiled

    from cait.model import fused

    tile = getattr(fused.default(4), name)
    found = compiled(name, tile, 4)
    assert found["shared"] <= fused.shared_memory(tile, 4, 48, torch.bfloat16) < 227 * 2**10
    assert found["stack"] <= 256  # bytes of a thread: a few addresses, no tile


def test_the_default_tiles_fit_an_h100() -> None:
    from cait.model import fused

    for heads in range(1, 17):
        for tile in fused.default(heads):
            assert fused.shared_memory(tile, heads, 48, torch.bfloat16) <= 227 * 2**10
