"""The kernels of attention with talking heads: under Triton's interpreter here, compiled where there is a GPU.

Triton decides when it is imported whether it interprets, so the tests that run kernels do so in a
process of their own, which `test_the_kernels_under_the_interpreter` starts.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from cait_attention_cases import attention_case, attention_results
from harness import LIMIT, REPO, environment, over_table, works
from torch.utils.checkpoint import checkpoint

import cait
from cait.errors import UserError

pytest.importorskip("triton", reason="Triton is not on this platform")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
runs = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="run under Triton's interpreter, in another process"
)

MODELS = [(heads, N) for N in (196, 197, 576, 784) for heads in (4, 6, 8, 16)]


@pytest.mark.skipif(
    CUDA or INTERPRETED, reason="the kernels are tested here, not in another process"
)
def test_the_kernels_under_the_interpreter(pytestconfig):
    # `make test-kernel` has the models' own shapes
    command = [sys.executable, "-m", "pytest", __file__, "-m", pytestconfig.option.markexpr]
    interpreted = environment() | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    works(subprocess.run(command, env=interpreted, capture_output=True, text=True, timeout=LIMIT))


case = partial(attention_case, batch=1)  # the interpreter is slow


def errors(got, exact):
    """The norm of each difference, as a share of the norm of what is exact, or of 1."""
    return [
        float(torch.dist(a.double(), b) / b.norm().clamp(min=1))
        for a, b in zip(got, exact, strict=True)
    ]


def no_less_exact(inputs):
    """Hold the fused attention's errors to the reference's, both beside the reference in float64; and tell them."""
    exact = attention_results([tensor.double() for tensor in inputs], "reference")
    fused = attention_results(inputs, "fused")
    plain = attention_results(inputs, "reference")
    assert not fused[3].any()  # the gradient of bias_l cancels in the softmax
    for tensors in (fused, plain, exact):
        del tensors[3]  # what the reference has there is rounding
    # The maps are rounded at most where the reference rounds them, so fused loses as much as the reference, give or
    # take luck. Gradients of a few numbers vary more. float32 loses what three products of truncated tf32 lose.
    ours = errors(fused, exact)
    theirs = errors(plain, exact)
    for error, plain_error, luck in zip(ours, theirs, (1.2, 1.2, 2, 2, 2), strict=True):
        assert error <= luck * plain_error + 1e-5, (ours, theirs)
    return ours, theirs


@runs
@over_table(__file__, "cases")
def test_no_less_exact_than_the_reference(sizes, monkeypatch):
    from contrib.fused import attention

    sizes = {"batch": 1} | sizes
    for name in sizes.keys() & {"ROWS", "PROGRAMS"}:
        monkeypatch.setattr(attention, name, sizes.pop(name))
    dtype = getattr(torch, sizes.pop("dtype"))
    no_less_exact(attention_case(dtype=dtype, **sizes))


@runs
def test_several_tiles_a_program(monkeypatch):
    from contrib.fused import attention

    monkeypatch.setattr(attention, "ROWS", 16)
    monkeypatch.setattr(attention, "PROGRAMS", 3)
    assert attention.turns(torch.empty(12, 13, 16), 6) == (3, 5)


@runs
@pytest.mark.kernel
@pytest.mark.parametrize(("heads", "N"), MODELS)
def test_no_less_exact_at_the_models_own_shapes(heads, N, monkeypatch):
    from contrib.fused import attention

    if INTERPRETED:  # fewer programs and chunks, so less time
        monkeypatch.setattr(attention, "ROWS", 512)
        tile = attention.Tile(256 if N < 256 else 512, 4, 1)
        monkeypatch.setattr(attention, "default", lambda *_: attention.Tiling(tile, tile))
    dtype, batch = (torch.bfloat16, 2) if CUDA else (torch.float16, 1)
    inputs = attention_case(heads, N, dtype, batch=batch)
    ours, theirs = no_less_exact(inputs)
    print(f"| {heads} × {N} | {ours} | {theirs} |", flush=True)
    if CUDA or N < 200:  # the interpreter has but one order
        the_same_bits_twice(inputs)


@pytest.mark.skipif(not INTERPRETED, reason="products are set aside in the interpreter")
def test_float32_by_truncated_tf32(monkeypatch):
    """As a GPU may split them; the interpreter's own products are float32."""
    import numpy as np
    from triton.runtime import interpreter

    def high(x):
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    def create_dot(self, a, b, d, *_):
        (a, rest_a), (b, rest_b) = (
            (high(x), high(x - high(x))) for x in (a.data.copy(), b.data.copy())
        )
        return interpreter.TensorHandle(a @ rest_b + rest_a @ b + a @ b + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    no_less_exact(case(3, 33, torch.float32))


@runs
@pytest.mark.parametrize("k", [8, 70])
def test_any_width_and_any_layout(k):
    inputs = case(4, 20, torch.float32, k, batch=2)
    no_less_exact(inputs)
    expected = fused_output(inputs[0], inputs)
    wide = torch.zeros(2, 25, 3, 4, k + 3, device=DEVICE)
    for view in (
        wide[:, 2:22, :, :, 1:-2],
        torch.zeros(20, 2, 3, 4, k, device=DEVICE).transpose(0, 1),
    ):
        view.copy_(inputs[0])
        torch.testing.assert_close(fused_output(view, inputs), expected, rtol=0, atol=0)


def fused_output(qkv, inputs):
    from contrib.fused import attention

    return attention.talking_heads(qkv, *inputs[1:5], qkv.shape[-1] ** -0.5)[0]


@runs
# scores of hundreds; q·k beyond float16, scale · q·k within
@pytest.mark.parametrize("factor", [12, 100])
def test_scores_far_from_zero(factor):
    inputs = case(4, 40, torch.float16)
    inputs[0][:, :, :2] *= factor
    no_less_exact(inputs)
    # and all of a row far below 0, where what lies beyond the last key would win
    inputs[0][:, :, 0] = 30
    inputs[0][:, :, 1] = -30
    assert all(tensor.isfinite().all() for tensor in attention_results(inputs, "fused"))


def the_same_bits_twice(inputs):
    first, second = (attention_results(inputs, "fused") for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@runs
def test_the_same_bits_twice():
    the_same_bits_twice(case(2, 40, torch.float16, k=16))


@runs
def test_no_image_at_all():
    out, d_qkv, *others = attention_results(case(2, 5, torch.float32, k=16, batch=0), "fused")
    assert out.shape == (0, 5, 32)
    assert d_qkv.shape == (0, 5, 3, 2, 16)
    assert not any(gradient.any() for gradient in others)


@runs
@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules():
    from contrib.fused import attention

    qkv, *parameters, d_out = case(1, 5, torch.float32, k=16)
    inputs = [tensor.requires_grad_() for tensor in (qkv, *parameters)]
    torch.library.opcheck(attention.talking_heads, (*inputs, 0.25))
    _, heads = attention.talking_heads(*inputs, 0.25)
    weight_l, _, weight_w, bias_w = parameters
    inputs = [tensor.detach() for tensor in (d_out, heads, weight_l, weight_w, bias_w)]
    torch.library.opcheck(attention.talking_heads_backward, (*inputs, 0.25))


def network(backend="fused"):
    torch.manual_seed(0)
    fields = dict(patch_size=8, embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.5)
    return cait.create_model("xxs24", 24, 10, 0.0, attention_backend=backend, **fields).to(DEVICE)


def step(model, images, call=None):
    model.zero_grad()
    logits = model(images) if call is None else call(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@runs
@over_table(__file__, "precisions")
def test_a_network_with_it_compiled_checkpointed_and_plain(autocast, near, nearer):
    images = torch.randn(2, 3, 24, 24, device=DEVICE)
    model = network()
    with torch.autocast(DEVICE, torch.float16, enabled=autocast):
        expected = step(model, images)
        reference = step(network("reference"), images)
        torch.testing.assert_close(expected, reference, rtol=1e-2, atol=near)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        checkpointed = partial(checkpoint, torch.nn.Sequential(model), use_reentrant=False)
        for call in (compiled, checkpointed):
            again = step(model, images, call)
            torch.testing.assert_close(again, expected, rtol=1e-3, atol=nearer)


@runs
def test_no_map_is_kept():
    kept = []
    qkv, *parameters, _ = case(2, 100, torch.float32, k=16)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        fused_output(qkv.requires_grad_(), [qkv, *parameters])
    # rows are padded to a multiple of 16
    assert qkv.numel() <= max(kept) <= qkv.numel() * 112 / 100


@pytest.mark.parametrize(
    ("heads", "k", "dtype", "words"),
    [
        (4, 48, torch.float64, "bfloat16, float16 or float32, not float64"),
        (17, 8, torch.float32, "16 heads"),
        pytest.param(
            4,
            48,
            torch.float32,
            "CUDA",
            marks=pytest.mark.skipif(CUDA or INTERPRETED, reason="there it runs"),
        ),
    ],
)
def test_where_it_cannot_run_is_told(heads, k, dtype, words):
    with pytest.raises(UserError, match=f"^.*{words}.*$"):
        attention_results(case(heads, 5, dtype, k), "fused")


def test_without_triton_it_is_told(monkeypatch):
    """That all else runs without it, test_house has."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "contrib.fused.attention", raising=False)
    monkeypatch.delattr("contrib.fused.attention", raising=False)
    with pytest.raises(UserError, match="the fused attention needs Triton"):
        attention_results(case(2, 5, torch.float32, 8), "fused")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@over_table(__file__, "compiled")
def test_the_kernels_compile_for_a_gpu_that_is_not_here(name, N, monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    from kernel import compiled

    figures = compiled(name, 8, N)
    assert figures["shared"] < 48 * 2**10  # so that several programs share a processor, on any GPU
    assert figures["stack"] == 0  # nothing is spilled
    assert figures["registers"] > 0
