"""The kernels of attention with talking heads: under Triton's interpreter here, compiled where there is a GPU.

Triton decides when it is imported whether it interprets, so the tests that run kernels do so in a
process of their own, which `test_the_kernels_under_the_interpreter` starts.
"""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from cait_attention_cases import attention_case, attention_results
from harness import LIMIT, REPO, environment, slow
from torch import Tensor
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
on_gpu = pytest.mark.skipif(not CUDA, reason="no GPU here")

# Few shapes, because the interpreter takes seconds for each. It has no products of bfloat16.
FEW = [
    (4, 1, torch.float32),
    (3, 33, torch.float32),
    (1, 16, torch.float16),
    (4, 21, torch.float16),
    (6, 35, torch.float16),
    (8, 7, torch.float16),
    (16, 5, torch.float16),
]
MODELS = [(heads, N) for N in (196, 197, 576, 784) for heads in (4, 6, 8, 16)]


@pytest.mark.skipif(
    CUDA or INTERPRETED, reason="the kernels are tested here, not in another process"
)
def test_the_kernels_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    # `make test-kernel` has the models' own shapes
    command = [sys.executable, "-m", "pytest", __file__, "-m", pytestconfig.option.markexpr]
    interpreted = environment() | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.fixture
def tiles_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows, where the interpreter has more to be faster."""
    from contrib.fused import attention

    monkeypatch.setattr(attention, "ROWS", 16)


case = partial(attention_case, batch=1)  # the interpreter is slow


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        ((a.double() - b).norm() / b.norm().clamp(min=1)).item()
        for a, b in zip(got, exact, strict=True)
    ]


def no_less_exact(given: list[Tensor]) -> str:
    """Hold the fused attention's errors to the reference's, both beside the reference in float64; and tell them."""
    exact = attention_results([tensor.double() for tensor in given], "reference")
    fused, plain = attention_results(given, "fused"), attention_results(given, "reference")
    for tensors in (fused, plain, exact):
        # it cancels in the softmax: what the reference has there is rounding
        bias_l = tensors.pop(3)
        if tensors is fused:
            assert not bias_l.any()
    # The maps are rounded at most where the reference rounds them, so fused loses as much as the reference, give or
    # take luck. Gradients of a few numbers vary more. float32 loses what three products of truncated tf32 lose.
    lost = list(zip(errors(fused, exact), errors(plain, exact), (1.2, 1.2, 2, 2, 2), strict=True))
    told = " | ".join(f"{error:.1e}, {of_plain:.1e}" for error, of_plain, _ in lost)
    assert all(error <= luck * of_plain + 1e-5 for error, of_plain, luck in lost), told
    return told


@runs
@pytest.mark.parametrize(("heads", "N", "dtype"), FEW)
def test_no_less_exact_than_the_reference(
    heads: int, N: int, dtype: torch.dtype, tiles_as_compiled: None
) -> None:
    no_less_exact(case(heads, N, dtype, batch=2 if heads < 4 else 1))


@runs
@pytest.mark.kernel
@pytest.mark.parametrize(("heads", "N"), MODELS)
def test_no_less_exact_at_the_models_own_shapes(
    heads: int, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contrib.fused import attention

    if INTERPRETED:  # fewer programs and chunks, so less time
        monkeypatch.setattr(attention, "ROWS", 512)
        tile = attention.Tile(256 if N < 256 else 512, 4, 1)
        monkeypatch.setattr(attention, "default", lambda *_: attention.Tiling(tile, tile))
    given = case(heads, N, torch.bfloat16 if CUDA else torch.float16, batch=2 if CUDA else 1)
    print(f"| {heads} × {N} | {no_less_exact(given)} |", flush=True)
    if CUDA or N < 200:  # the interpreter has but one order
        the_same_bits_twice(given)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_no_tile_holds(dtype: torch.dtype) -> None:
    no_less_exact(case(4, 270, dtype, k=8))


@runs
def test_several_tiles_a_program(monkeypatch: pytest.MonkeyPatch, tiles_as_compiled: None) -> None:
    from contrib.fused import attention

    monkeypatch.setattr(attention, "PROGRAMS", 3)
    # 13 tiles: 5, 5 and 3, the last of them by half
    given = case(6, 13, torch.float32, k=8, batch=2)
    assert attention.turns(given[0].new_empty(12, 13, 16), 6) == (3, 5)
    no_less_exact(given)


@pytest.mark.skipif(not INTERPRETED, reason="products are set aside in the interpreter")
def test_float32_by_truncated_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU may split them; the interpreter's own products are float32."""
    import numpy as np
    from triton.runtime import interpreter

    def high(x: Any) -> Any:
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        (a, rest_a), (b, rest_b) = (
            (high(x), high(x - high(x))) for x in (a.data.copy(), b.data.copy())
        )
        return interpreter.TensorHandle(a @ rest_b + rest_a @ b + a @ b + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    no_less_exact(case(3, 33, torch.float32))


@runs
@pytest.mark.parametrize("k", [8, 70])
def test_any_width_and_any_layout(k: int) -> None:
    given = case(4, 20, torch.float32, k, batch=2)
    no_less_exact(given)
    expected = attention_results(given, "fused")
    wide = torch.zeros(2, 25, 3, 4, k + 3, device=DEVICE)
    for view in (
        wide[:, 2:22, :, :, 1:-2],
        torch.zeros(20, 2, 3, 4, k, device=DEVICE).transpose(0, 1),
    ):
        view.copy_(given[0])
        torch.testing.assert_close(fused_output(view, given), expected[0], rtol=0, atol=0)


def fused_output(qkv: Tensor, given: list[Tensor]) -> Tensor:
    from contrib.fused import attention

    return attention.talking_heads(qkv, *given[1:5], qkv.shape[-1] ** -0.5)[0]


@runs
# scores of hundreds; q·k beyond float16, scale · q·k within
@pytest.mark.parametrize("factor", [12, 100])
def test_scores_far_from_zero(factor: int) -> None:
    given = case(4, 40, torch.float16)
    given[0][:, :, :2] *= factor
    no_less_exact(given)
    given[0][:, :, 0] = (
        30  # and all of a row far below 0, where what lies beyond the last key would win
    )
    given[0][:, :, 1] = -30
    assert all(tensor.isfinite().all() for tensor in attention_results(given, "fused"))


def the_same_bits_twice(given: list[Tensor]) -> None:
    for first, second in zip(
        attention_results(given, "fused"), attention_results(given, "fused"), strict=True
    ):
        assert torch.equal(first, second)


@runs
def test_the_same_bits_twice() -> None:
    the_same_bits_twice(case(2, 40, torch.float16, k=16))


@runs
def test_no_image_at_all() -> None:
    out, d_qkv, *others = attention_results(case(2, 5, torch.float32, k=16, batch=0), "fused")
    assert out.shape == (0, 5, 32)
    assert d_qkv.shape == (0, 5, 3, 2, 16)
    assert not any(gradient.any() for gradient in others)


@runs
@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules() -> None:
    from contrib.fused import attention

    qkv, *parameters, d_out = case(1, 5, torch.float32, k=16)
    inputs = [tensor.requires_grad_() for tensor in (qkv, *parameters)]
    torch.library.opcheck(attention.talking_heads, (*inputs, 0.25))
    _, heads = attention.talking_heads(*inputs, 0.25)
    weight_l, _, weight_w, bias_w = parameters
    given = [tensor.detach() for tensor in (d_out, heads, weight_l, weight_w, bias_w)]
    torch.library.opcheck(attention.talking_heads_backward, (*given, 0.25))


def network(backend: str = "fused") -> torch.nn.Module:
    torch.manual_seed(0)
    fields: dict = dict(patch_size=8, embed_dim=32, num_heads=2, depth=1, layer_scale_init=0.5)
    return cait.create_model("xxs24", 24, 10, 0.0, attention_backend=backend, **fields).to(DEVICE)


def step(model: torch.nn.Module, images: Tensor, call=None) -> list[Tensor]:
    model.zero_grad()
    logits = model(images) if call is None else call(images)
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@runs
@pytest.mark.parametrize("autocast", [True, *slow(False)])
def test_a_network_with_it_compiled_checkpointed_and_plain(autocast: bool) -> None:
    images = torch.randn(2, 3, 24, 24, device=DEVICE)
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
                torch.testing.assert_close(
                    ours, reference, rtol=1e-3, atol=1e-4 if autocast else 1e-6
                )


@runs
def test_no_map_is_kept() -> None:
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
def test_where_it_cannot_run_is_told(heads: int, k: int, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        attention_results(case(heads, 5, dtype, k), "fused")
    assert "\n" not in str(caught.value)
    attention_results(case(heads, 5, dtype, k), "default")


def test_without_triton_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """That all else runs without it, test_house has."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "contrib.fused.attention", raising=False)
    monkeypatch.delattr("contrib.fused.attention", raising=False)
    with pytest.raises(UserError, match="the fused attention needs Triton"):
        attention_results(case(2, 5, torch.float32, 8), "fused")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("name", "N"), [("forward", 576), ("backward", 197), ("backward", 576)])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(
    name: str, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    from kernel import compiled

    found = compiled(name, 8, N)
    assert found["shared"] < 48 * 2**10  # so that several programs share a processor, on any GPU
    assert found["stack"] == 0  # nothing is spilled
    assert found["registers"] > 0
